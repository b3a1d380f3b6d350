"""Hostile wheels: a sound small one with, at random, something wrong with it.

Most are wrong in one place and right everywhere else, RECORD included, so that each check is
reached; some have bytes changed, cut out or put in besides.
"""

from __future__ import annotations

import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

from scripts.wheel.names import VERSION_MODULE
from tests.scripts import toys
from tests.scripts.checkouts import NATIVE, version_module
from tests.scripts.wheels import record, with_metadata

FOLDER = "vllm-0.20.2.dist-info"
RECORD, METADATA = f"{FOLDER}/RECORD", f"{FOLDER}/METADATA"
BLOCK = 1 << 20  # bytes of zeros that one piece of a bomb inflates to

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s4B4H3L5H2L")
_END = struct.Struct("<4s4H2LH")


@dataclass
class Entry:
    """One member as it is zipped; what the two headers say may be set to anything."""

    name: bytes
    data: bytes = b""
    mode: int = 0o100644
    method: int = 8
    packed: bytes | None = None  # in place of the deflated `data`
    size: int | None = None  # and what they inflate to
    crc: int | None = None
    flags: int = 0
    local_name: bytes | None = None
    local_flags: int | None = None
    extra: bytes = b""
    local_extra: bytes = b""
    comment: bytes = b""
    descriptor: bytes = b""
    date: int = 23720
    system: int = 3
    version: int = 20
    internal: int = 0
    lies: dict[str, int] = field(default_factory=dict)
    """By `local_` or `central_` and the name of a field: what it says instead."""

    @property
    def text(self) -> str:
        """The name, as RECORD would have it."""
        return self.name.decode("utf-8", "replace")


def pack(entries: Sequence[Entry], comment: bytes = b"") -> bytes:
    """Return the zip file of `entries`."""
    body, directory = b"", b""
    for one in entries:
        packed, size, crc = one.packed, one.size, one.crc
        if packed is None:
            packed = _deflated(one.data) if one.method == 8 else one.data
        size = len(one.data) if size is None else size
        crc = zlib.crc32(one.data) if crc is None else crc

        def said(where: str, what: str, value: int, limit: int, one: Entry = one) -> int:
            return one.lies.get(f"{where}_{what}", value) & limit

        offset, name = len(body), one.name if one.local_name is None else one.local_name
        body += _LOCAL.pack(
            b"PK\3\4",
            one.version,
            one.flags if one.local_flags is None else one.local_flags,
            said("local", "method", one.method, 0xFFFF),
            0,
            one.date,
            said("local", "crc", crc, 0xFFFFFFFF),
            said("local", "packed", len(packed), 0xFFFFFFFF),
            said("local", "size", size, 0xFFFFFFFF),
            len(name),
            len(one.local_extra),
        )
        body += name + one.local_extra + packed + one.descriptor
        directory += _CENTRAL.pack(
            b"PK\1\2",
            20,
            one.system,
            one.version & 0xFF,
            one.lies.get("reserved", 0),
            one.flags,
            one.method,
            0,
            one.date,
            said("central", "crc", crc, 0xFFFFFFFF),
            said("central", "packed", len(packed), 0xFFFFFFFF),
            said("central", "size", size, 0xFFFFFFFF),
            len(one.name),
            len(one.extra),
            len(one.comment),
            0,
            one.internal,
            (one.mode << 16) & 0xFFFFFFFF | (0x10 if one.name.endswith(b"/") else 0),
            said("central", "offset", offset, 0xFFFFFFFF),
        )
        directory += one.name + one.extra + one.comment
    count = min(len(entries), 0xFFFF)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), len(body), len(comment))
    return body + directory + end + comment


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


@cache
def bomb(blocks: int) -> tuple[bytes, int]:
    """Return what inflates to so many MiB of zeros, and its CRC."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(BLOCK)) + packer.flush(zlib.Z_FULL_FLUSH)
    crc = 0
    for _ in range(blocks):
        crc = zlib.crc32(_ZEROS, crc)
    return block * blocks + packer.flush(), crc


_ZEROS = bytes(BLOCK)


def sound() -> list[Entry]:
    """Return the members of the stock wheel of the small vLLM of `toys`."""
    files = {name: text.encode() for name, text in toys.FILES.items() if name.startswith("vllm/")}
    files |= {VERSION_MODULE: version_module("0.20.2"), NATIVE: b"\x7fELF" + bytes(range(256)) * 8}
    return [Entry(name.encode(), data) for name, data in with_metadata(files).items()]


Mutation = Callable[[Random, list[Entry]], None]


def one_of(entries: Sequence[Entry], name: str) -> Entry:
    """Return the member `name`, or the first where another mutation has taken it away."""
    return next((one for one in entries if one.text == name), entries[0])


def _read_whole(rng: Random) -> str:
    return rng.choice((METADATA, RECORD, VERSION_MODULE, toys.WORKER, toys.STATE))


def inflates(rng: Random, entries: list[Entry]) -> None:
    """A member that is read inflates to as much as 1 GiB."""
    blocks = rng.choice((1, 9, 64, 1024))
    one = one_of(entries, _read_whole(rng))
    one.packed, one.crc = bomb(blocks)
    one.size = blocks * BLOCK
    if rng.random() < 0.3:
        one.size = rng.choice((1, 100, one.size // 2, one.size - 1))


def _growing(rng: Random, line: bytes) -> bytes:
    return line * (rng.choice((10, 1000, 9 << 20)) // len(line) + 1)


def long_texts(rng: Random, entries: list[Entry]) -> None:
    """A text with a great many lines or one long line, all of them valid by themselves."""
    name = rng.choice((METADATA, RECORD, VERSION_MODULE))
    one = one_of(entries, name)
    lines = {
        METADATA: (b"Version: 0.20.2\n", b"Name: vllm\n", b"Version:", b"\n", b"x" * 1000 + b"\n"),
        RECORD: (b"a,sha256=b,1\n", b'"', b",,\n", b"\r", b"a,", b"vllm/__init__.py,a,1\n"),
        VERSION_MODULE: (
            b"__version__ = version = '0.20.2'\n",
            b"__version_tuple__ = version_tuple = (0, 20, 2)\n",
            b"#\n",
        ),
    }[name]
    more = _growing(rng, rng.choice(lines))
    one.data = more + one.data if rng.random() < 0.5 else one.data + more


NAMES = (
    b"vllm/a\nb.py", b"vllm/a\x1b[31mred.py", b"vllm/\x07bell.py", b"vllm/a\rb", b"\n",
    b"\x1b]0;t\x07", "vllm/\u202egnp.py".encode(), "vllm/\u2028.py".encode(),
    "vllm/\x85.py".encode(), b"vllm/\xff.py", b"vllm/\0.py", b"/etc/x", b"../x",
    b"vllm/../../x", b"vllm\\x", b"C:x", b"vllm//x", b"./x", b"", b"vllm/" + b"x" * 300,
    b"vllm/" + b"x/" * 3000 + b"y", b"x" * 65000, b"vllm/x/", b"vllm/~", b".",
    f"{FOLDER}/{'y' * 65000}".encode(), f"{FOLDER}/\n".encode(), "größe".encode("cp437"),
    b"vllm/worker.py/x", b"vllm", b"vllm_overlay", b"vllm_overlay/x.py", b"Vllm/Worker.py", b" ",
    f"{FOLDER}/sboms/kvfix.cdx.json".encode(), b"vllm-0.20.2.dist-info", b"other-1.dist-info/x",
    b"vllm-0.20.2+kvfix.0.1.0.dist-info", b"vllm-0.20.2+kvfix.0.1.0.dist-info/METADATA",
    b"vllm_overlay.py", b"vllm/_version.py/", b"vllm-\x1b[1m.dist-info/x", b"a-b-c.dist-info/x",
)  # fmt: skip


def odd_names(rng: Random, entries: list[Entry]) -> None:
    """A member more, or one that is called otherwise, whose name no file should have."""
    name = rng.choice(NAMES)
    flags = 0x800 if rng.random() < 0.5 else 0
    if rng.random() < 0.7:
        entries.insert(rng.randrange(len(entries)), Entry(name, b"x", flags=flags))
    else:
        one = rng.choice(entries)
        one.name, one.flags = name, flags


def modes(rng: Random, entries: list[Entry]) -> None:
    """A link, a device, a folder with content, or a file of any mode."""
    one = rng.choice([*entries, one_of(entries, _read_whole(rng))])
    kind = rng.choice((stat.S_IFLNK, stat.S_IFDIR, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK, 0))
    one.mode = kind | rng.choice((0o777, 0o644, 0o4755, 0))
    if rng.random() < 0.3:
        entries.insert(0, Entry(b"vllm/folder/", rng.choice((b"", b"x")), one.mode))
    if rng.random() < 0.3:
        entries.insert(0, Entry(b"vllm/link", b"../../etc/passwd", stat.S_IFLNK | 0o777))


def twice(rng: Random, entries: list[Entry]) -> None:
    """A member that is there twice, is gone, or stands elsewhere."""
    at = rng.randrange(len(entries))
    what = rng.randrange(3)
    if what == 0:
        entries.insert(rng.randrange(len(entries)), entries[at])
    elif what == 1:
        del entries[at]
    else:
        entries.insert(rng.randrange(len(entries)), entries.pop(at))


VERSIONS = (
    b"", b"\xff\xfe", b"__version__ = version = '0.20.2'\n", b"__version__ = '0.20.2'\n",
    *(
        b"__version__ = version = %b\n__version_tuple__ = version_tuple = %b\n" % pair
        for pair in (
            (b"'0.20.2'", b"(0)"), (b"'0.20.2'", b"('a')"), (b"'0.20.2'", b"({[]: 1})"),
            (b"'0.20.2'", b"(0, 20, 2"), (b"'0.20.2'", b"()"), (b"'0.20.2'", b"(None,)"),
            (b"'0.20.2'", b"(" * 5000 + b")" * 5000), (b"'0.20.2'", b"(0" + b"+1" * 50000 + b")"),
            (b"'0.20.2'", b"(0," + b"-" * 100000 + b"1)"), (b"'0.20.2'", b"(0, 20, 2, 'x', [1])"),
            (b"'0.20.2'", b"(" + b"1," * 900_000 + b")"), (b"'0.20.2'", b"(x, 20, 2)"),
            (b"'0.20.2'", b"(" + b"9" * 5000 + b", 1)"), (b"'0.20.2'", b"(0, 20, 2.0)"),
            (b"'%b'" % (b"9" * 5000), b"(0, 20, 2)"), (b"'0.20.2+cu129'", b"(0, 20, 2, 'cu129')"),
            (b"'0.20.2rc1'", b"(0, 20, 2, 'rc1')"), (b"'\x1b[31m'", b"(0, 20, 2)"),
            (b"'0.20.2'", b"(0, 20, 2) + (lambda: 0)()"), (b"'0.20.2'", b"(True, 20, 2)"),
            (b"'0.20.2'", b"(0, 20, 2, *())"), (b"'0.20.2'", b"(*'ab',)"), (b"'0.20.2'", b"(1j)"),
        )
    ),
)  # fmt: skip


def version_modules(rng: Random, entries: list[Entry]) -> None:
    """A `vllm/_version.py` that states its version in no way that a build has."""
    one_of(entries, VERSION_MODULE).data = rng.choice(VERSIONS)


def metadata(rng: Random, entries: list[Entry]) -> None:
    """A METADATA whose headers are odd."""
    one = one_of(entries, METADATA)
    old, new = rng.choice(
        (
            (b"Version: 0.20.2", b"Version: " + b"9" * 5000), (b"Version: 0.20.2", b"Version:"),
            (b"Version: 0.20.2", b"Version: 0.20.2\x1b[31m"), (b"Name: vllm", b"Name: v\xffm"),
            (b"Name: vllm", b"Name: vllm\x1b]0;x\x07"), (b"Name: vllm", b"Name: VLLM"),
            (b"Version: 0.20.2", b"version: 0.20.2\r"), (b"\n", b"\r\n"), (b"\n", b"\r"),
            (b"Name: vllm", b"Name: vllm\nName: vllm"), (b"Name: vllm\n", b""), (b"\n\n", b"\n"),
            (b"Version: 0.20.2", b"Version: 0.20.2+cu129"), (b"Version: 0.20.2", b"Version: 0.20"),
            (b"Version: 0.20.2", b"Version: 0.20.2+kvfix.0.1.0"), (b"Name: vllm", b"Name: \n vllm"),
            (b"Version: 0.20.2", b"Version:  v0.20.2 "), (b"Name", "\ufeffName".encode()),
        )
    )  # fmt: skip
    one.data = one.data.replace(old, new)


def records(rng: Random, entries: list[Entry]) -> None:
    """A RECORD with a row that says something else."""
    one = one_of(entries, RECORD)
    rows = one.data.splitlines(keepends=True)
    if not rows:
        return
    at = rng.randrange(len(rows))
    name, _, rest = rows[at].rstrip(b"\n").partition(b",")
    digest, _, size = rest.partition(b",")
    new = rng.choice(
        (
            b"", rows[at] * 2, b"\n", b"\x1b[31m,sha256=x,1\n", b'"a\nb",sha256=x,1\n',
            b"\xff,a,1\n", b"%b,%b,-1\n" % (name, digest),
            b"%b,%b,%b\n" % (name, digest, b"9" * 5000), b"%b,%b,0%b\n" % (name, digest, size),
            b"%b,%b,\n" % (name, digest), b"%b,,%b\n" % (name, size),
            b"%b,md5=x,%b\n" % (name, size), b"%b,sha256=x,%b\n" % (name, size), b'"%b\n' % name,
            b"%b,\x1b[31m=x,%b\n" % (name, size), b"%b,%b,%b,more\n" % (name, digest, size),
            b"%b,%b,%b\n" % (name, digest, "٣".encode()), b'"%b",%b,%b\n' % (name, digest, size),
            b"%b,%b,1%b\n" % (name, digest, size), b"\0,,\n", b"%b,%b\n" % (name, digest),
            b'"%b"' % (b"x" * 200_000), b"%b,sha512=%b,%b\n" % (name, digest, size),
        )
    )  # fmt: skip
    one.data = b"".join([*rows[:at], new, *rows[at + 1 :]])


def signatures(rng: Random, entries: list[Entry]) -> None:
    """Signatures, in RECORD or not, as files, folders or elsewhere."""
    for name in rng.sample(("RECORD.jws", "RECORD.p7s", "RECORD.jws/", "RECORD.p7s/x", "x.jws"), 2):
        where = rng.choice((FOLDER, FOLDER, f"{FOLDER}/sub", "vllm"))
        entries.insert(rng.randrange(len(entries)), Entry(f"{where}/{name}".encode(), b"{}"))
        if rng.random() < 0.5:
            row = rng.choice((f"{where}/{name},,\n", f"{where}/{name},sha256=x,2\n"))
            one_of(entries, RECORD).data += row.encode()


def zip_fields(rng: Random, entries: list[Entry]) -> None:
    """A field of a header that is odd, or that the two headers of a member disagree on."""
    one = rng.choice([*entries, one_of(entries, _read_whole(rng))])
    number = rng.choice((0, 1, 7, 100, 0xFFFF, 0xFFFFFFFE, 0xFFFFFFFF, 1 << 30))
    what = rng.randrange(14)
    if what == 0:
        one.flags = rng.choice((1, 8, 0x20, 0x40, 0x800, 0x2000, 0xFFFF, 6))
    elif what == 1:
        one.local_flags = rng.choice((1, 8, 0x800, 0x40, 6))
    elif what == 2:
        one.method = rng.choice((0, 1, 9, 12, 14, 93, 99, 0xFFFF))
    elif what == 3:
        one.date = rng.choice((0, 0xFFFF, 0x0021, 0xFFE0))
    elif what == 4:
        one.system, one.version = rng.choice((0, 3, 10, 255)), rng.choice((0, 10, 45, 63, 64, 255))
    elif what == 5:
        one.extra = rng.choice(_EXTRAS)
    elif what == 6:
        one.local_extra = rng.choice(_EXTRAS)
    elif what == 7:
        one.local_name = rng.choice((b"other", one.name[::-1], one.name + b"x", b""))
    elif what == 8:
        one.descriptor = rng.choice((b"PK\7\x08" + bytes(12), bytes(12), b"x", bytes(24)))
        one.flags |= rng.choice((0, 8))
    elif what == 9:
        one.comment = rng.choice((b"\x1b[31m", b"x" * 60000, b"PK\5\6"))
    elif what == 10:
        one.internal = number & 0xFFFF
    elif what == 11:
        one.lies["reserved"] = number & 0xFF
    else:
        where = rng.choice(("local", "central"))
        kinds = ("crc", "packed", "size", "method" if where == "local" else "offset")
        one.lies[f"{where}_{rng.choice(kinds)}"] = number


_EXTRAS = (
    b"x", b"\1\0\0\0", b"\1\0\xff\xff", b"\1\0\x08\0" + b"\xff" * 8, b"\xfe\xca\x02\0hi",
    b"\x75\x70\x0a\0\1" + bytes(4) + b"other", b"\1\0\x10\0" + bytes(16),
    b"\xfe\xca\xfb\xff" + bytes(65531),
)  # fmt: skip


def many(rng: Random, entries: list[Entry]) -> None:
    """A great many members: more than memory should be spent on."""
    if rng.random() < 0.9:  # they take a second to make
        return
    count = rng.choice((10_000, 200_000))
    body = bytearray()
    for number in range(count):
        body += _CENTRAL.pack(
            b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 23720, 0, 0, 0, 8, 0, 0, 0, 0, 0o100644 << 16, 0
        )
        body += b"%08d" % number
    # Only the directory has them: it is read before anything else.
    entries.append(Entry(b"vllm/many", bytes(body), method=0, lies={"directory": 1}))


MUTATIONS: tuple[Mutation, ...] = (
    inflates, long_texts, odd_names, modes, twice, version_modules, metadata, records, signatures,
    zip_fields, zip_fields, many,
)  # fmt: skip


def mangled(rng: Random, data: bytes) -> bytes:
    """Return `data` with some bytes changed, cut out, put in, or the end gone."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out)) if out else 0
        # The directory is short beside the rest, and what the reader goes by.
        if rng.random() < 0.5:
            at = max(len(out) - rng.randrange(1, 1500), 0)
        what = rng.randrange(5)
        if what == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            out[at : at + rng.choice((1, 4, 100))] = b""
        elif what == 2:
            out[at:at] = rng.choice((b"\0", b"PK\5\6", b"PK\1\2", b"\xff" * 4, rng.randbytes(20)))
        elif what == 3 and rng.random() < 0.3:
            del out[at:]
        elif out:
            out[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\1\0\0\0"))
    return bytes(out)


def hostile(rng: Random) -> bytes:
    """Return a stock wheel with one or two things wrong with it, or none."""
    entries = sound()
    for mutation in rng.choices(MUTATIONS, k=rng.choice((0, 1, 1, 1, 1, 2))):
        mutation(rng, entries)
        # Most of the time RECORD agrees: else it alone would be what is refused.
        if mutation not in (records, signatures) and rng.random() < 0.85:
            _agree(entries)
    extra = next((one for one in entries if "directory" in one.lies), None)
    if extra is not None:
        entries.remove(extra)
        return _with_directory(pack(entries), extra.data)
    comments = (b"", b"", b"", b"\x1b[31m", b"PK\5\6" + bytes(18), b"x" * 65535)
    data = pack(entries, rng.choice(comments))
    return mangled(rng, data) if rng.random() < 0.25 else data


def _agree(entries: list[Entry]) -> None:
    own = one_of(entries, RECORD)
    if own.text == RECORD and own.packed is None:
        own.data = record({one.text: one.data for one in entries}, RECORD)


def _with_directory(data: bytes, more: bytes) -> bytes:
    """Return a zip file whose directory has `more` records than its members."""
    body, end = data[:-22], list(_END.unpack(data[-22:]))
    end[3] = end[4] = min(end[3] + len(more) // 54, 0xFFFF)
    end[5] += len(more)
    return body + more + _END.pack(*end)


def tampered(rng: Random, patched: bytes) -> bytes:
    """Return a patched wheel in which some bytes are others than those that `apply` wrote."""
    what = rng.randrange(4)
    if what == 0:
        return mangled(rng, patched)
    out = bytearray(patched)
    directory = int(_END.unpack(patched[-22:])[6]) if patched[-22:-18] == b"PK\5\6" else 0
    if what == 1 and directory:  # a field of a record of the directory
        at, found = directory, []
        while out[at : at + 4] == b"PK\1\2":
            found.append(at)
            lengths = struct.unpack_from("<3H", out, at + 28)
            at += 46 + sum(lengths)
        out[rng.choice(found) + rng.randrange(4, 42)] ^= 1 << rng.randrange(8)
    elif what == 2:  # a field of a local header
        at = rng.choice([at for at in range(len(out)) if out[at : at + 4] == b"PK\3\4"])
        out[at + rng.randrange(4, 26)] ^= 1 << rng.randrange(8)
    else:
        comment = rng.choice((b"x", b"\x1b[31m"))
        out[-2:] = struct.pack("<H", len(comment))
        out += comment
    return bytes(out)
