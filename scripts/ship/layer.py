"""The difference as a layer of an image: a tar that goes on top of one which holds the stock wheel.

Nothing runs when a layer is put on, so nothing checks what lies below it: that is what `--check` of
the installer is for. Byte for byte what is in it is what the patched wheel has.
"""

from __future__ import annotations

import calendar
import hashlib
import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from scripts.wheel.plan import Plan
from scripts.wheel.reader import WheelReader
from scripts.wheel.record import record_row, record_text
from scripts.wheel.writer import is_dropped, renamed

ROOT_IN_IMAGE = "/usr/local/lib/python3.12/dist-packages"
"""Where vLLM's own images have it; `python3 -c "import vllm; print(vllm.__path__)"` says where."""
_WHITEOUT = ".wh."  # of the OCI image format: what is called so behind it goes


@dataclass(frozen=True)
class Layer:
    """A layer, not compressed, and the digest by which an image's configuration names it."""

    data: bytes

    @property
    def diff_id(self) -> str:
        """`sha256:` and 64 hexadecimal digits."""
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}"


def layer_of(source: WheelReader, plan: Plan, root: str) -> Layer:
    """Return what an image with `source` installed in its folder `root` lacks to be patched.

    The new metadata folder is there as a whole, and the one of the stock wheel goes, since its
    name has the version in it. What Pythons have compiled of the changed files goes as well, if
    `root` says which Python: some do not look whether a source has changed.
    """
    folder = PurePosixPath(root.strip("/"))
    files = _files(source, plan)
    gone = {source.dist_info}
    if python := re.search(r"/python(\d)\.(\d+)/", f"/{folder}/"):
        for path in map(PurePosixPath, plan.replaced):
            if path.suffix == ".py":
                name = f"{path.stem}.cpython-{python[1]}{python[2]}.pyc"
                gone.add(str(path.parent / "__pycache__" / name))
    date = source.members[f"{source.dist_info}/METADATA"].info.date_time
    when = calendar.timegm((*date, 0, 0, 0))  # as in a patched wheel, the date is the source's
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data, mode in _entries(folder, files, gone):
            info = tarfile.TarInfo(name)
            info.mtime, info.mode = when, mode
            info.type = tarfile.REGTYPE if data is not None else tarfile.DIRTYPE
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return Layer(buffer.getvalue())


def _files(source: WheelReader, plan: Plan) -> dict[str, tuple[bytes, int]]:
    """Return content and mode of each file that is not in an installed stock wheel as it is."""
    record = f"{source.dist_info}/RECORD"
    files: dict[str, tuple[bytes, int]] = {}
    rows = {}
    for name in source.names:
        final = renamed(source, name, plan.dist_info)
        if name == record or is_dropped(source, name):
            continue
        rows[final] = source.records[name]
        if name in plan.replaced or final != name:
            data = plan.replaced[name] if name in plan.replaced else source.read(name)
            files[final] = data, _mode(source, name)
            rows[final] = record_row(data)
    added = {**plan.added, f"{plan.dist_info}/INSTALLER": b"kvfix\n"}
    for name, data in added.items():
        files[name], rows[name] = (data, 0o644), record_row(data)
    own = f"{plan.dist_info}/RECORD"
    files[own] = record_text(dict(sorted(rows.items())), own), 0o644
    return files


def _mode(source: WheelReader, name: str) -> int:
    # As pip and uv: a wheel says of a file whether it can be run, and no more.
    return 0o755 if source.members[name].info.external_attr >> 16 & 0o111 else 0o644


def _entries(
    folder: PurePosixPath, files: dict[str, tuple[bytes, int]], gone: set[str]
) -> Iterator[tuple[str, bytes | None, int]]:
    """Yield name, content (None of a folder) and mode, folders that are new before their files."""
    entries: dict[str, tuple[bytes | None, int]] = {}
    for name, (data, mode) in files.items():
        path = folder / name
        entries[str(path)] = data, mode
        new = name.split("/")[0]
        if new != "vllm":  # the folders of vLLM are there, and keep their owner and mode
            for above in path.relative_to(folder).parents:
                if str(above) != ".":
                    entries[str(folder / above)] = None, 0o755
    for name in gone:
        path = folder / name
        entries[str(path.parent / f"{_WHITEOUT}{path.name}")] = b"", 0o644
    for name in sorted(entries):
        yield name, *entries[name]
