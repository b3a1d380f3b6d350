from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from scripts.system.errors import UsageError
from scripts.upstream.settings import IndexSettings, read_settings

pytestmark = pytest.mark.usefixtures("no_settings")


def pip_file(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Path:
    path = folder / "named-pip.conf"
    path.write_text(dedent(text))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    return path


def uv_file(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Path:
    path = folder / "named-uv.toml"
    path.write_text(dedent(text))
    monkeypatch.setenv("UV_CONFIG_FILE", str(path))
    return path


def test_nobody_says_anything() -> None:
    assert read_settings() == IndexSettings()


class TestEnvironment:
    def test_pip(self, monkeypatch: pytest.MonkeyPatch, no_settings: Path) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "https://a.test/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://b.test/simple\nhttps://c.test/simple")
        monkeypatch.setenv("PIP_FIND_LINKS", "~/wheels https://d.test/links.html")
        monkeypatch.setenv("PIP_TRUSTED_HOST", "a.test b.test:8080")
        monkeypatch.setenv("PIP_CERT", "~/my certificates/ca.pem")
        monkeypatch.setenv("PIP_CLIENT_CERT", "/client.pem")
        monkeypatch.setenv("PIP_PROXY", "http://proxy.test:3128")
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "90")
        monkeypatch.setenv("PIP_NO_INDEX", "true")
        assert read_settings() == IndexSettings(
            index_urls=("https://a.test/simple",),
            extra_index_urls=("https://b.test/simple", "https://c.test/simple"),
            find_links=(str(no_settings / "wheels"), "https://d.test/links.html"),
            trusted_hosts=("a.test", "b.test:8080"),
            no_index=True,
            ca_bundle=no_settings / "my certificates" / "ca.pem",
            client_cert=Path("/client.pem"),
            proxy="http://proxy.test:3128",
            timeout=90,
        )

    def test_uv(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UV_DEFAULT_INDEX", "main=https://a.test/simple")
        monkeypatch.setenv("UV_INDEX_URL", "https://old.test/simple")
        monkeypatch.setenv("UV_INDEX", "in-house=https://b.test/simple https://c.test/x?y=z")
        monkeypatch.setenv("UV_EXTRA_INDEX_URL", "https://d.test/simple")
        monkeypatch.setenv("UV_FIND_LINKS", "/wheels,https://e.test/links.html")
        monkeypatch.setenv("UV_INSECURE_HOST", "a.test b.test")
        monkeypatch.setenv("UV_HTTP_TIMEOUT", "120")
        assert read_settings() == IndexSettings(
            index_urls=("https://a.test/simple",),
            extra_index_urls=(
                "https://b.test/simple",
                "https://c.test/x?y=z",
                "https://d.test/simple",
            ),
            find_links=("/wheels", "https://e.test/links.html"),
            trusted_hosts=("a.test", "b.test"),
            timeout=120,
        )

    @pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("0", False)])
    def test_uv_without_a_network(
        self, monkeypatch: pytest.MonkeyPatch, value: str, offline: bool
    ) -> None:
        monkeypatch.setenv("UV_OFFLINE", value)
        assert read_settings().no_index is offline

    def test_uv_credentials_of_a_named_index(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UV_INDEX", "in-house=https://b.test/simple other=https://c.test/simple")
        monkeypatch.setenv("UV_INDEX_IN_HOUSE_USERNAME", "reader")
        monkeypatch.setenv("UV_INDEX_IN_HOUSE_PASSWORD", "p@ss/word")
        assert read_settings().extra_index_urls == (
            "https://reader:p%40ss%2Fword@b.test/simple",
            "https://c.test/simple",
        )

    def test_bundle_of_requests_and_curl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CURL_CA_BUNDLE", "/curl.pem")
        assert read_settings().ca_bundle == Path("/curl.pem")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/requests.pem")
        assert read_settings().ca_bundle == Path("/requests.pem")
        monkeypatch.setenv("PIP_CERT", "/pip.pem")
        assert read_settings().ca_bundle == Path("/pip.pem")

    def test_proxy_without_a_scheme(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_PROXY", "proxy.test:3128")
        assert read_settings().proxy == "http://proxy.test:3128"

    def test_empty_is_as_good_as_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("PIP_INDEX_URL", "PIP_CERT", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_CONFIG_FILE"):
            monkeypatch.setenv(name, "")
        assert read_settings() == IndexSettings()

    @pytest.mark.parametrize("name", ["PIP_TIMEOUT", "UV_HTTP_TIMEOUT"])
    def test_time_limit_that_is_no_number(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "soon")
        with pytest.raises(UsageError, match="soon"):
            read_settings()


class TestPipFiles:
    def test_named_by_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        text = """
            [global]
            index_url = https://a.test/simple
            extra-index-url =
                https://b.test/simple
                https://c.test/simple
            find-links =
            timeout = 60
            [install]
            trusted-host = b.test
            index-url = https://%(not)s-expanded.test/simple
            [download]
            index-url = https://ignored.test/simple
            """
        pip_file(monkeypatch, tmp_path, text + "            client-cert = /none.pem\n")
        found = read_settings()
        assert found.index_urls == ("https://%(not)s-expanded.test/simple",)
        assert found.extra_index_urls == ("https://b.test/simple", "https://c.test/simple")
        assert found.trusted_hosts == ("b.test",)
        assert found.timeout == 60
        assert found.client_cert is None

    def test_of_the_user(self, monkeypatch: pytest.MonkeyPatch, no_settings: Path) -> None:
        monkeypatch.delenv("PIP_CONFIG_FILE")
        for folder, letter in ((".pip", "a"), ("pip", "b")):
            (no_settings / folder).mkdir()
            (no_settings / folder / "pip.conf").write_text(
                f"[global]\nindex-url = https://{letter}.test/\nproxy = http://{letter}.test/\n"
            )
        assert read_settings().index_urls == ("https://b.test/",)

    def test_of_the_user_is_not_read_beside_a_named_one(
        self, monkeypatch: pytest.MonkeyPatch, no_settings: Path, tmp_path: Path
    ) -> None:
        (no_settings / ".pip").mkdir()
        (no_settings / ".pip" / "pip.conf").write_text("[global]\nproxy = http://user.test/\n")
        pip_file(monkeypatch, tmp_path, "[global]\nindex-url = https://a.test/\n")
        assert read_settings().index_urls == ("https://a.test/",)
        assert read_settings().proxy is None

    @pytest.mark.parametrize("head", ["", "[global]\n"])
    def test_broken(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head: str) -> None:
        path = pip_file(monkeypatch, tmp_path, head + "my-password\n")
        with pytest.raises(UsageError) as caught:
            read_settings()
        assert str(path) in caught.value.found
        assert "my-password" not in caught.value.found


class TestUvFiles:
    def test_named_by_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        text = """
            find-links = ["wheels"]
            allow-insecure-host = ["a.test"]
            extra-index-url = ["https://d.test/simple"]
            [[index]]
            name = "in-house"
            url = "https://b.test/simple"
            [[index]]
            url = "https://a.test/simple"
            default = true
            [[index]]
            name = "only-torch"
            url = "https://ignored.test/simple"
            explicit = true
            [[index]]
            url = "https://flat.test/links.html"
            format = "flat"
            """
        uv_file(monkeypatch, tmp_path, text)
        monkeypatch.setenv("UV_INDEX_IN_HOUSE_USERNAME", "reader")
        assert read_settings() == IndexSettings(
            index_urls=("https://a.test/simple",),
            extra_index_urls=("https://reader:@b.test/simple", "https://d.test/simple"),
            find_links=("https://flat.test/links.html", str(tmp_path / "wheels")),
            trusted_hosts=("a.test",),
        )

    def test_section_of_uv_pip(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        uv_file(monkeypatch, tmp_path, '[pip]\nindex-url = "https://a.test/"\nno-index = true\n')
        assert read_settings() == IndexSettings(index_urls=("https://a.test/",), no_index=True)

    def test_nearest_project_then_user_then_system(
        self, monkeypatch: pytest.MonkeyPatch, no_settings: Path, tmp_path: Path
    ) -> None:
        monkeypatch.delenv("UV_NO_CONFIG")
        monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "system"))
        here = tmp_path / "project" / "below"
        here.mkdir(parents=True)
        monkeypatch.chdir(here)
        (here / "pyproject.toml").write_text("[project]\nname = 'says-nothing-to-uv'\n")

        for folder, letter in (("system", "s"), ("home", "u")):
            (tmp_path / folder / "uv").mkdir(parents=True)
            (tmp_path / folder / "uv" / "uv.toml").write_text(
                f'index-url = "https://{letter}.test/"\nfind-links = ["https://{letter}.test/f"]\n'
            )
        assert read_settings().index_urls == ("https://u.test/",)

        (tmp_path / "project" / "pyproject.toml").write_text(
            '[tool.uv]\nindex-url = "https://p.test/"\nfind-links = ["https://p.test/f"]\n'
        )
        found = read_settings()
        assert found.index_urls == ("https://p.test/",)
        assert found.find_links == ("https://p.test/f", "https://u.test/f", "https://s.test/f")

        # In one folder uv.toml hides [tool.uv].
        (tmp_path / "project" / "uv.toml").write_text('index-url = "https://t.test/"\n')
        assert read_settings().index_urls == ("https://t.test/",)

    @pytest.mark.parametrize("text", ["index = [", "index = 3", "[[index]]\nname = 'no-url'\n"])
    def test_broken(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
        path = uv_file(monkeypatch, tmp_path, text)
        with pytest.raises(UsageError) as caught:
            read_settings()
        assert str(path) in caught.value.found

    def test_named_but_absent(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "none.toml"))
        with pytest.raises(UsageError, match=r"none\.toml"):
            read_settings()


def test_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip_file(
        monkeypatch,
        tmp_path,
        "[global]\nindex-url = https://pip-file.test/\nextra-index-url = https://extra.test/\n",
    )
    assert read_settings().index_urls == ("https://pip-file.test/",)
    uv_file(monkeypatch, tmp_path, 'index-url = "https://uv-file.test/"\n')
    assert read_settings().index_urls == ("https://uv-file.test/",)
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip-environment.test/")
    assert read_settings().index_urls == ("https://pip-environment.test/",)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv-environment.test/")
    assert read_settings().index_urls == ("https://uv-environment.test/",)
    # Each setting for itself: only pip's file names extra indexes.
    assert read_settings().extra_index_urls == ("https://extra.test/",)
