"""The names and versions a wheel carries, and what each of them says once it is patched.

Three places state a vLLM wheel's version: its file name, METADATA, and `vllm/_version.py`. Its
`dist-info` folder repeats it. All of them must agree, or `pip show`, the package and the file
that was deployed tell different stories.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from itertools import islice

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from scripts.system.errors import AlreadyPatchedError, BrokenWheelError

MARK = "kvfix"
VERSION_MODULE = "vllm/_version.py"

# Versions of vLLM have 40 characters at most; what is far longer is no version, and not parsed.
_VERSION_LINE = re.compile(r"^(__version__ = version = )(['\"])(?P<value>[^'\"\n]{,200})\2$", re.M)
_TUPLE_LINE = re.compile(r"^(__version_tuple__ = version_tuple = )(?P<value>\(.{,200}\))$", re.M)


@dataclass(frozen=True)
class WheelName:
    """A wheel's file name, taken apart.

    `build` and `tags` keep the text of the name, for a tag that is spelled anew may be lost:
    the name says `manylinux_2_35_x86_64` where the WHEEL file inside says `linux_x86_64`.
    """

    distribution: str
    version: Version
    build: str
    tags: str

    @classmethod
    def parse(cls, text: str) -> WheelName:
        """Take `text` apart.

        Raises:
            BrokenWheelError: It is no name of a wheel.
        """
        try:
            if not text.isprintable():
                raise InvalidWheelFilename("it has characters that cannot be shown")
            distribution, version, _, _ = parse_wheel_filename(text)
        except ValueError as error:  # InvalidWheelFilename is one
            raise BrokenWheelError(
                f"{text!r} is no file name of a wheel: {error}",
                expected="<name>-<version>[-<build>]-<python>-<abi>-<platform>.whl",
                next_step="give the file back the name that its builder gave it",
            ) from error
        parts = text[: -len(".whl")].split("-")
        return cls(distribution, version, "-".join(parts[2:-3]), "-".join(parts[-3:]))

    def with_version(self, version: Version) -> WheelName:
        """Return the name of the same build in another version."""
        return WheelName(self.distribution, version, self.build, self.tags)

    def __str__(self) -> str:
        parts = (_escaped(self.distribution), str(self.version), self.build, self.tags)
        return "-".join(part for part in parts if part) + ".whl"


def dist_info_folder(distribution: str, version: Version) -> str:
    """Return the name of the metadata folder, spelled as the wheel format asks for."""
    return f"{_escaped(distribution)}-{version}.dist-info"


def _escaped(distribution: str) -> str:
    return canonicalize_name(distribution).replace("-", "_")


def patched_version(source: Version, patch_set: str, choice: str = "") -> Version:
    """Return the version of `source` with the patch set `patch_set` in it.

    `0.20.2` becomes `0.20.2+kvfix.0.1.0`; an in-house build keeps its own local part in front:
    `0.20.2+cu129` becomes `0.20.2+cu129.kvfix.0.1.0`. A `choice` of the fixes stands at the end:
    `0.20.2+kvfix.0.1.0.without.k10`.

    Raises:
        AlreadyPatchedError: `source` is such a version itself.
    """
    if is_patched(source):
        raise AlreadyPatchedError(
            f"version {source} already carries {MARK}",
            expected="a stock release",
            next_step="give the wheel that this one was made from",
        )
    local = f"{source.local}.{MARK}" if source.local else MARK
    return Version(f"{source.public}+{local}.{patch_set}" + (f".{choice}" if choice else ""))


def is_patched(version: Version) -> bool:
    """Whether `version` names a patched release."""
    return MARK in (version.local or "").split(".")


def states_choice(version: Version) -> bool:
    """Whether the patched `version` says that it holds some of the fixes only."""
    return not {"only", "without"}.isdisjoint((version.local or "").split("."))


def metadata_header(metadata: bytes, field: str) -> str:
    """Return the value of a header that METADATA must hold exactly once.

    Raises:
        BrokenWheelError: It stands there never, or more than once.
    """
    return _header(metadata, field)["value"].decode("utf-8", "replace").strip()


def patched_metadata(metadata: bytes, version: Version) -> bytes:
    """Return METADATA with another version and every other byte as it was.

    Raises:
        BrokenWheelError: There is not exactly one version in it.
    """
    start, end = _header(metadata, "Version").span("value")
    return metadata[:start] + str(version).encode() + metadata[end:]


def _header(metadata: bytes, field: str) -> re.Match[bytes]:
    # Only up to the first empty line: the description behind it may show headers of its own.
    blank = re.search(rb"^\r?$", metadata, re.M)
    headers = metadata[: blank.start()] if blank else metadata
    pattern = rb"^" + field.encode() + rb":[ \t]*(?P<value>[^\r\n]*)"
    found = list(islice(re.finditer(pattern, headers, re.M | re.I), 2))
    if len(found) != 1:
        raise BrokenWheelError(
            f"METADATA has {'several' if found else 'no'} headers {field!r}",
            expected="exactly one",
            next_step="build the wheel again",
        )
    return found[0]


def patched_version_module(module: bytes, source: Version, version: Version) -> bytes:
    """Return `vllm/_version.py` with another version and everything else as it was.

    The module may leave out the local part of `source`: vLLM's build writes the module first and
    marks the CUDA or ROCm variant only in METADATA.

    Args:
        module: The module of the source wheel.
        source: The version in the source wheel's METADATA.
        version: The version to state. In the tuple its local part is one string, as
            setuptools-scm has it: `(0, 20, 2, 'kvfix.0.1.0')`.

    Raises:
        BrokenWheelError: The module does not state that version, once as text and once as a tuple.
    """
    try:
        text = module.decode("utf-8")
        stated = _only(_VERSION_LINE, text)["value"]
        old = Version(stated)
        numbers = ast.literal_eval(_only(_TUPLE_LINE, text)["value"])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise _unlike_scm(f"a version that cannot be read: {error}") from error
    if not isinstance(numbers, tuple):
        raise _unlike_scm(f"{numbers!r} where a tuple should be")
    if old.public != source.public or old.local not in (None, source.local):
        raise _unlike_scm(f"version {stated} where METADATA has {source}")
    local = (old.local,) if old.local else ()
    public = numbers[: len(numbers) - len(local)]
    suffixes = sum(part is not None for part in (old.pre, old.post, old.dev))
    if public[: len(public) - suffixes] != old.release or numbers[len(public) :] != local:
        raise _unlike_scm(f"the tuple {numbers} beside version {stated}")
    text = _VERSION_LINE.sub(lambda line: f"{line[1]}{line[2]}{version}{line[2]}", text)
    text = _TUPLE_LINE.sub(lambda line: f"{line[1]}{(*public, version.local)!r}", text)
    return text.encode("utf-8")


def _only(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = list(islice(pattern.finditer(text), 2))
    if len(found) != 1:
        raise _unlike_scm(f"{'several' if found else 'no'} lines like {pattern.pattern!r}")
    return found[0]


def _unlike_scm(what: str) -> BrokenWheelError:
    return BrokenWheelError(
        f"{VERSION_MODULE} has {what}",
        expected="the version of METADATA once as text and once as a tuple",
        next_step="build the wheel again from a checkout of the release",
    )
