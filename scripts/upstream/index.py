"""The files of a release: what the user's index offers, and the cache of those that are pinned.

unearth finds and transfers; `scripts.upstream.settings` says where. Every pinned file is kept as
`<cache>/files/<sha256>/<name>`. The folder's name is what the file has to be, and its content is
hashed before each use, so that nobody has to trust the cache.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from scripts.system.errors import HashMismatchError, NetworkError, StorageError, UsageError
from scripts.system.files import only_process, replacing, sha256, sha256_beside
from scripts.upstream.cache import cache_folder

if TYPE_CHECKING:
    import ssl

    from unearth import Link, PackageFinder
    from unearth.fetchers import PyPIClient

    from scripts.upstream.lock import LockedFile
    from scripts.upstream.settings import IndexSettings

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class OfferedFile:
    """A file that an index offers."""

    name: str
    sha256: str | None
    """As the index states it; None where it states none."""
    yanked: str | None
    """The reason given, possibly empty; None for a file that is not yanked."""
    link: Link = field(repr=False, compare=False)


def fetch(file: LockedFile, *, distribution: str = "vllm") -> Path:
    """Return the path of the pinned `file`, from the cache or else from the user's index.

    A file that is already in the cache, and is what the lock says, needs no network. Processes
    that want the same file wait for the one that transfers it.

    Raises:
        NetworkError: The file is not in the cache and no source gives it.
        HashMismatchError: The file that the sources give is another one; nothing is kept.
        StorageError: The cache cannot be written.
        UsageError: The user's index settings cannot be understood.
    """
    target = _place(file)
    try:
        if _is_whole(target, file.sha256):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with only_process(target.parent, "fetches the same file"):
            if target.exists():
                if _is_whole(target, file.sha256):  # the process before us has fetched it
                    return target
                _warn(f"{target} is damaged; it is removed and fetched again")
                target.unlink()
            _fetch_into(target, file, distribution)
        return target
    except OSError as error:  # of a file: those of the network are NetworkError by now
        raise StorageError(
            f"cannot use the cache {target.parent}: {error.strerror or error}",
            expected="a folder that can be written and locked, with room for the file",
            next_step="free space or put that right, then run the same command; "
            "KVFIX_CACHE names another folder",
        ) from error


def fetch_and(file: LockedFile, use: Callable[[Path], _Made]) -> _Made:
    """Return what `use` makes of the pinned `file`; one in the cache is hashed meanwhile.

    What is made of one that turns out to be damaged, or is raised, does not count.

    Raises:
        KvfixError: As `fetch`, and whatever `use` does.
    """
    target = _place(file)
    if target.is_file():
        with sha256_beside(target) as digest, suppress(OSError):
            made = _attempt(use, target)
            if digest.result() == file.sha256:
                return made.result()
    return use(fetch(file))


def _attempt(use: Callable[[Path], _Made], path: Path) -> Future[_Made]:
    made: Future[_Made] = Future()
    try:
        made.set_result(use(path))
    except Exception as error:
        made.set_exception(error)
    return made


def _place(file: LockedFile) -> Path:
    return cache_folder() / "files" / file.sha256 / file.name


def offered(
    distribution: str, version: str, complete: Callable[[Collection[str]], bool] = bool
) -> tuple[OfferedFile, ...]:
    """Return the wheels and source archives of one version that the sources offer, by name.

    Yanked ones are included: a pinned release stays what it is.

    Args:
        distribution: Whose.
        version: Of which version.
        complete: Whether the names that were found are all that is looked for; one by default.

    Raises:
        NetworkError: No source answered, or one did not, and the others are not complete.
        HashMismatchError: Two sources offer different files under one name.
        UsageError: The user's index settings cannot be understood.
    """
    found: dict[str, OfferedFile] = {}
    with _Sources() as sources:
        for link in sources.links(distribution):
            if not _is_of(link.filename, version):
                continue
            new = OfferedFile(link.filename, _stated_hash(link), link.yank_reason, link)
            old = found.setdefault(new.name, new)
            if old.sha256 is None:
                found[new.name] = new
            elif new.sha256 not in (None, old.sha256):
                raise HashMismatchError(
                    f"two sources offer different files as {new.name}:"
                    + _bullets([f"{one.link.redacted}: sha256 {one.sha256}" for one in (old, new)]),
                    expected="one content for one name",
                    next_step="find out which is the release's own, and take the other source out "
                    "of the index settings",
                )
    sources.complain(distribution, fatal=not complete(found))
    return tuple(found[name] for name in sorted(found))


def published(distribution: str) -> tuple[Version, ...]:
    """Return the final versions that have a source archive which is not yanked, oldest first.

    Raises:
        NetworkError: A source did not answer: what it has might be the newest.
        UsageError: The user's index settings cannot be understood.
    """
    found: set[Version] = set()
    with _Sources() as sources:
        for link in sources.links(distribution):
            try:
                version = parse_sdist_filename(link.filename)[1]
            except InvalidSdistFilename:
                continue
            if not link.is_yanked and not version.is_prerelease:
                found.add(version)
    sources.complain(distribution, fatal=True)
    return tuple(sorted(found))


def transferred_hash(file: OfferedFile) -> str:
    """Transfer an offered file, keep nothing of it, and return its sha256.

    Raises:
        NetworkError: The transfer failed.
    """
    with _Sources() as sources:
        return sources.transfer(file.link, lambda piece: None)


def _fetch_into(target: Path, file: LockedFile, distribution: str) -> None:
    others: list[str] = []  # files of this name that are not the pinned one
    with _Sources() as sources:
        for link in sources.links(distribution):
            if link.filename != file.name:
                continue
            stated = _stated_hash(link)
            if stated not in (None, file.sha256):
                others.append(f"{link.redacted}: sha256 {stated}, as its index states")
                continue
            try:
                with replacing(target) as out:
                    got = sources.transfer(link, out.write)
                    if got != file.sha256:
                        raise _OtherFileError(f"sha256 {got}, of {out.tell()} bytes received")
                return
            except _OtherFileError as error:
                others.append(f"{link.redacted}: {error}")
            except NetworkError as error:  # the next source may have it
                sources.failures.append(error.found)
    if others:
        raise HashMismatchError(
            f"{file.name} is not the pinned file:" + _bullets(others + sources.failures),
            expected=f"sha256 {file.sha256}, as patches/upstream.lock says",
            next_step="if the transfer was cut short, run the same command again; else find out "
            "who serves another file under this name (nothing of it was kept)",
        )
    raise NetworkError(
        f"cannot get {file.name}, and the cache {cache_folder()} does not have it:"
        + _bullets(sources.reasons()),
        expected="one source of pip's or uv's settings that has it, or a filled cache",
        next_step="connect once and run the same command again; or copy the file, from wherever "
        f"you have it, to {target}: its sha256 is checked",
    )


class _OtherFileError(Exception):
    """What came is not the pinned file."""


class _Sources:
    """The user's sources, asked one after the other, and what each failed to do.

    One that fails does not hide the others: its reason goes to `failures`. A source that answers
    but does not know the distribution is no failure; it goes to `absent`.
    """

    def __init__(self) -> None:
        from scripts.upstream.settings import read_settings

        self._settings = read_settings()
        self.failures: list[str] = []
        self.absent: list[str] = []
        self.answers = 0

    def __enter__(self) -> _Sources:
        self._session = _session(self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def reasons(self) -> list[str]:
        """Say why nothing was found."""
        return self.failures + self.absent or ["no source of the index settings has it"]

    def complain(self, distribution: str, *, fatal: bool) -> None:
        """Name the sources that did not answer.

        Raises:
            NetworkError: It is fatal, and there are such, or none was asked.
        """
        if fatal and (self.failures or not self.answers):
            raise NetworkError(
                f"no source that answers lists the files of {distribution} that are looked for:"
                + _bullets(self.reasons()),
                expected="an answer of every source in the index settings",
                next_step="connect, or correct the index settings of pip or uv, then run the same "
                "command again",
            )
        for failure in self.failures:
            _warn(f"not every source answered: {failure}")

    def links(self, distribution: str) -> Iterator[Link]:
        """Yield every wheel and source archive of `distribution`, yanked ones included."""
        from unearth import Link

        for finder in self._finders():
            source = Link(finder.sources[0]["url"]).redacted
            try:
                # unearth logs, and goes on, where a page is refused or is no index page.
                with _warnings_of("unearth") as refusals:
                    packages = list(finder.find_all_packages(distribution, allow_yanked=True))
            except Exception as error:  # foreign input: whatever it broke, the others are asked
                self.failures.append(f"{source}: {_reason(error)}")
                continue
            unknown = [text for text in refusals if "(404)" in text]
            self.absent += unknown
            self.failures += [text for text in refusals if text not in unknown]
            self.answers += len(refusals) == len(unknown)
            for package in packages:
                yield package.link

    def transfer(self, link: Link, write: Callable[[bytes], object]) -> str:
        """Give the content of `link` to `write`, piece by piece, and return its sha256.

        Raises:
            NetworkError: The server cannot be reached, refuses, or stops half-way.
        """
        from scripts.system.console import progress

        digest = hashlib.sha256()
        with ExitStack() as stack:
            # The bytes as they lie on the server: an archive must not be decoded on the way.
            request = self._session.get_stream(
                link.normalized, headers={"Accept-Encoding": "identity"}
            )
            with _as_network_error(link):
                response = stack.enter_context(request)
                if response.status_code != 200:
                    raise OSError(f"HTTP {response.status_code} {response.reason_phrase}")
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            advance = stack.enter_context(progress(link.filename, total))
            pieces = response.iter_raw()
            while True:
                with _as_network_error(link):
                    piece = next(pieces, None)
                if piece is None:
                    return digest.hexdigest()
                digest.update(piece)
                write(piece)
                advance(len(piece))

    def _finders(self) -> Iterator[PackageFinder]:
        """Yield one finder per source, so that each can fail alone: near ones first."""
        from unearth import PackageFinder

        session: Any = self._session  # unearth's own client is typed as none of its `Fetcher`s
        settings = self._settings
        for link in settings.find_links:
            yield PackageFinder(session, find_links=[link], ignore_compatibility=True)
        if settings.no_index:
            return
        if not settings.index_urls:
            # Without any source unearth asks the index that is its default.
            yield PackageFinder(session, ignore_compatibility=True)
        for url in (*settings.index_urls, *settings.extra_index_urls):
            yield PackageFinder(session, index_urls=[url], ignore_compatibility=True)


def _session(settings: IndexSettings) -> PyPIClient:
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    auth = MultiDomainBasicAuth(
        prompting=sys.stdin is not None and sys.stdin.isatty(),
        index_urls=[*settings.index_urls, *settings.extra_index_urls],
    )
    context = _tls_context(settings)
    try:
        return PyPIClient(
            trusted_hosts=settings.trusted_hosts,
            verify=context or True,
            proxy=settings.proxy,
            timeout=settings.timeout,
            follow_redirects=True,  # mirrors send files from elsewhere
            auth=auth,
        )
    except Exception as error:  # it reads proxies and SSL_CERT_FILE, and fails in many ways
        raise UsageError(
            f"the HTTP client refuses the settings: {_reason(error)}",
            expected="a proxy URL, trusted hosts and certificates that it understands",
            next_step="correct the proxy and certificate settings (HTTPS_PROXY, PIP_PROXY, "
            "PIP_TRUSTED_HOST, SSL_CERT_FILE, or the files of pip and uv)",
        ) from error


def _tls_context(settings: IndexSettings) -> ssl.SSLContext | None:
    bundle, client = settings.ca_bundle, settings.client_cert
    if bundle is None and client is None:
        return None  # the HTTP client's own choice, SSL_CERT_FILE included
    import ssl

    try:
        if bundle is not None and bundle.is_dir():
            context = ssl.create_default_context(capath=bundle)
        else:
            context = ssl.create_default_context(cafile=bundle)
        if client is not None:
            context.load_cert_chain(client)
    except OSError as error:  # an SSLError is one
        raise UsageError(
            f"the certificates {bundle or 'of the system'}, {client or 'no client certificate'} "
            f"cannot be loaded: {error}",
            expected="PEM files",
            next_step="correct PIP_CERT, PIP_CLIENT_CERT, REQUESTS_CA_BUNDLE or pip's files",
        ) from error
    return context


@contextmanager
def _as_network_error(link: Link) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the HTTP client's own classes differ between its versions
        raise NetworkError(
            f"{link.redacted}: {_reason(error)}",
            expected="the whole file",
            next_step="run the same command again",
        ) from error


@contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    """Collect what a library logs as a warning, instead of having it printed."""
    texts: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, collector = logging.getLogger(name), Collector(logging.WARNING)
    logger.addHandler(collector)
    try:
        yield texts
    finally:
        logger.removeHandler(collector)


def _is_whole(path: Path, expected: str) -> bool:
    return path.is_file() and sha256(path) == expected


def _is_of(name: str, version: str) -> bool:
    """Whether `name` is a wheel or a `.tar.gz` of exactly this version."""
    try:
        if name.endswith(".whl"):
            return parse_wheel_filename(name)[1] == Version(version)
        return name.endswith(".tar.gz") and parse_sdist_filename(name)[1] == Version(version)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return False


def _stated_hash(link: Link) -> str | None:
    stated = (link.hash_option or {}).get("sha256")
    return stated[0].lower() if stated else None


def _bullets(lines: list[str]) -> str:
    return "".join(f"\n  - {line}" for line in lines)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _warn(text: str) -> None:
    from scripts.system.console import err

    err.print(f"warning: {text}", markup=False)
