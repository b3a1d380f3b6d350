"""Where the user gets packages from, as his pip and uv are already told.

Four places are read. For each setting the first one that says anything wins, whole: lists of two
places are never mixed.

1. uv's environment variables (`UV_DEFAULT_INDEX`, `UV_INDEX`, ...)
2. pip's environment variables (`PIP_INDEX_URL`, `PIP_FIND_LINKS`, ...) and
   `REQUESTS_CA_BUNDLE` / `CURL_CA_BUNDLE`
3. uv's files: the nearest `uv.toml` or `[tool.uv]` at or above the working directory, then the
   user's `uv.toml`, then the system's; or only the one that `UV_CONFIG_FILE` names
4. pip's files: global, user, site, and the one that `PIP_CONFIG_FILE` names; `[install]` over
   `[global]`

The environment comes before files because it is what a CI job or a shell sets for this one run;
both tools rank it so. uv comes before pip because the sessions themselves prefer uv where it is
present: what it installs from is then what the wheel comes from.

Proxies (`HTTPS_PROXY`, `NO_PROXY`, ...), `SSL_CERT_FILE`, netrc and keyring need nothing here:
the HTTP client of unearth reads them.

Sources: pip's "Configuration" page, uv's "Configuration files" and "Environment variables" pages.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from scripts.project import read_toml
from scripts.system.errors import UsageError

_DEFAULT_TIMEOUT = 15.0  # seconds; pip's own


@dataclass(frozen=True)
class IndexSettings:
    """The sources to ask, and how.

    `index_urls` is empty when nobody names an index and the default one is to be asked, unless
    `no_index` forbids that. URLs may carry credentials: never print them as they are.
    """

    index_urls: tuple[str, ...] = ()
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    no_index: bool = False
    ca_bundle: Path | None = None
    client_cert: Path | None = None
    proxy: str | None = None
    timeout: float = _DEFAULT_TIMEOUT  # seconds without an answer


_LISTS = ("extra-index-url", "find-links", "trusted-host")

# The settings that one place gives, under pip's names. Absent or empty: it says nothing.
_Layer = Mapping[str, list[str]]


def read_settings() -> IndexSettings:
    """Read the user's settings.

    Raises:
        UsageError: A configuration file or value cannot be understood.
    """
    layers = (_uv_environment(), _pip_environment(), _uv_files(), _pip_files())

    def values(name: str) -> tuple[str, ...]:
        return tuple(next((layer[name] for layer in layers if layer.get(name)), ()))

    def path(name: str) -> Path | None:
        return next((Path(value).expanduser() for value in values(name)), None)

    return IndexSettings(
        index_urls=values("index-url"),
        extra_index_urls=values("extra-index-url"),
        find_links=tuple(_expand(link) for link in values("find-links")),
        trusted_hosts=values("trusted-host"),
        no_index=any(value.lower() in ("1", "on", "true", "yes") for value in values("no-index")),
        ca_bundle=path("cert"),
        client_cert=path("client-cert"),
        # pip takes "host:port" as well.
        proxy=next((p if "://" in p else f"http://{p}" for p in values("proxy")), None),
        timeout=_seconds(values("timeout")),
    )


def _uv_environment() -> _Layer:
    def words(name: str, separator: str | None = None) -> list[str]:
        return [word.strip() for word in os.environ.get(name, "").split(separator) if word.strip()]

    def indexes(*names: str) -> list[str]:
        return [_named_index(word) for name in names for word in words(name)]

    return {
        "index-url": indexes("UV_DEFAULT_INDEX") or indexes("UV_INDEX_URL"),
        "extra-index-url": indexes("UV_INDEX", "UV_EXTRA_INDEX_URL"),
        "find-links": words("UV_FIND_LINKS", ","),
        "trusted-host": words("UV_INSECURE_HOST"),
        "timeout": words("UV_HTTP_TIMEOUT") or words("UV_REQUEST_TIMEOUT"),
        "no-index": words("UV_OFFLINE"),  # what lies in a folder that is named may be taken
    }


def _pip_environment() -> _Layer:
    layer = _pip_options(
        (name.removeprefix("PIP_"), value)
        for name, value in os.environ.items()
        if name.startswith("PIP_")
    )
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if bundle and "cert" not in layer:
        layer["cert"] = [bundle]
    return layer


def _uv_files() -> _Layer:
    merged: dict[str, list[str]] = {}
    for path, table in _uv_tables():
        # `[pip]` holds what only `uv pip` reads; it has the same keys as the top level.
        for section in (table, table.get("pip", {})):
            for name, values in _uv_table(path, section).items():
                # uv: arrays are joined, of anything else the nearest file's value stands.
                if name in _LISTS:
                    merged.setdefault(name, []).extend(values)
                elif values and not merged.get(name):
                    merged[name] = values
    return merged


def _uv_tables() -> Iterator[tuple[Path, dict[str, Any]]]:
    if named := os.environ.get("UV_CONFIG_FILE"):
        yield Path(named), _read_uv(Path(named))
        return
    if os.environ.get("UV_NO_CONFIG"):
        return
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (path := folder / "uv.toml").is_file():
            yield path, _read_uv(path)
            break
        if (path := folder / "pyproject.toml").is_file():
            table = _read_uv(path).get("tool", {}).get("uv")
            if table is not None:
                yield path, table
                break
    if (path := _config_home() / "uv" / "uv.toml").is_file():
        yield path, _read_uv(path)
    folders = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    for folder in (*map(Path, folders), Path("/etc")):
        if (path := folder / "uv" / "uv.toml").is_file():
            yield path, _read_uv(path)
            return


def _uv_table(path: Path, table: dict[str, Any]) -> dict[str, list[str]]:
    try:
        default: list[str] = []
        extra: list[str] = []
        flat: list[str] = []
        for index in table.get("index", ()):
            if index.get("explicit"):
                continue  # only for the packages that a project pins to it
            url = _with_credentials(index["url"], index.get("name", ""))
            if index.get("format") == "flat":
                flat.append(url)
            else:
                (default if index.get("default") else extra).append(url)
        return {
            "index-url": default or _listed(table.get("index-url")),
            "extra-index-url": extra + _listed(table.get("extra-index-url")),
            "find-links": [
                # uv: a relative path counts from the file that names it.
                link if "://" in link else str(path.parent / Path(link).expanduser())
                for link in flat + _listed(table.get("find-links"))
            ],
            "trusted-host": _listed(table.get("allow-insecure-host")),
            "no-index": _listed(table.get("no-index")),
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise _unreadable(path, f"an index setting has another form than uv's: {error}") from error


def _pip_files() -> _Layer:
    options: dict[str, list[tuple[str, str]]] = {"global": [], "install": []}
    for path in _pip_paths():
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeError) as error:
            raise _unreadable(path, str(error)) from error
        except configparser.Error as error:
            # Its text quotes the line, which may hold a password.
            raise _unreadable(path, type(error).__name__) from None
        for section, found in options.items():
            if parser.has_section(section):
                found += parser.items(section)
    # Of two values pip takes the command's over the general one, then the later file's.
    return _pip_options((*options["global"], *options["install"]))


def _pip_paths() -> list[Path]:
    import platformdirs

    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    name = "pip.ini" if sys.platform == "win32" else "pip.conf"
    shared = platformdirs.site_config_dir("pip", appauthor=False, multipath=True).split(os.pathsep)
    paths = [Path(folder) / name for folder in (*shared, "/etc")]
    if not (named and Path(named).exists()):
        user = platformdirs.user_config_path("pip", appauthor=False, roaming=True)
        if sys.platform == "darwin" and not user.is_dir():
            user = _config_home() / "pip"
        paths += [Path("~/.pip").expanduser() / name, user / name]
    paths.append(Path(sys.prefix) / name)
    if named:
        paths.append(Path(named))
    return paths


def _pip_options(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Bring pip's options into one form; a later value replaces an earlier one, never with ""."""
    options: dict[str, list[str]] = {}
    for key, value in pairs:
        name = key.lower().replace("_", "-").removeprefix("--").removeprefix("default-")
        if values := value.split() if name in _LISTS else [value.strip()] if value.strip() else []:
            options[name] = values
    return options


def _seconds(values: tuple[str, ...]) -> float:
    if not values:
        return _DEFAULT_TIMEOUT
    try:
        return float(values[0])
    except ValueError:
        raise UsageError(
            f"the time limit of pip or uv is {values[0]!r}",
            expected="a number of seconds",
            next_step="correct PIP_TIMEOUT, UV_HTTP_TIMEOUT or the configuration file",
        ) from None


def _named_index(word: str) -> str:
    """Take uv's `name=url` apart; a bare URL stays as it is."""
    match = re.match(r"([A-Za-z0-9._-]+)=(.+)", word)
    return _with_credentials(match[2], match[1]) if match else word


def _with_credentials(url: str, name: str) -> str:
    """Put in what `UV_INDEX_<NAME>_USERNAME` and `..._PASSWORD` say for the index `name`."""
    key = re.sub(r"[^A-Z0-9]", "_", name.upper())
    user = os.environ.get(f"UV_INDEX_{key}_USERNAME", "")
    password = os.environ.get(f"UV_INDEX_{key}_PASSWORD", "")
    if not name or not (user or password):
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    login = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{login}@{host}").geturl()


def _read_uv(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:  # a TOMLDecodeError is a ValueError
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} cannot be read: {reason}",
        expected="a configuration file that pip or uv understands",
        next_step="correct that file",
    )


def _listed(value: object) -> list[str]:
    if value is None:
        return []
    values: Iterable[object] = value if isinstance(value, list) else [value]
    return [str(item) for item in values]


def _expand(link: str) -> str:
    return link if "://" in link else str(Path(link).expanduser())


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
