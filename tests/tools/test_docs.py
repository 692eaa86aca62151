"""The documentation site is built from good pages, and refused for a link, an anchor or a page
that is wrong. Its search finds a page, in a browser.
"""

import functools
import http.server
import re
import shutil
import subprocess
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "docs-venv"
FAULTS = {  # by what is written at the end of a page: what mkdocs says of it
    "[no page](nowhere.md)\n": "nowhere.md",
    "[no anchor](memory.md#nowhere)\n": "#nowhere",
    "[no file](../examples/nowhere.py)\n": "../examples/nowhere.py",
    "![from elsewhere](https://example.com/a.png)\n": "expected nothing from another host",
    "A list\n- without an empty line before it\n": "expected an empty line",
}
ELSEWHERE = {  # in files outside docs, by the file
    "README.md": ("[no anchor](docs/memory.md#nowhere)\n", "#nowhere"),
    "CONTRIBUTING.md": ("[no anchor](docs/memory.md#nowhere)\n", "#nowhere"),
    "CHANGELOG.md": ("[no file](docs/nowhere.md)\n", "nowhere.md"),
    "examples/README.md": ("[no anchor](../docs/memory.md#nowhere)\n", "memory.md#nowhere"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Types into the search of the site, in a frame, opens the first result, and tells the server where
# it leads.
SEARCHER = """<iframe src="/index.html" width="1400" height="900"></iframe><script>
const frame = document.querySelector("iframe")
const until = async what => {
  for (;;) {
    const found = frame.contentDocument && what(frame.contentDocument)
    if (found) return found
    await new Promise(resolve => setTimeout(resolve, 100))
  }
}
frame.onload = async () => {
  frame.onload = null
  const input = await until(page => page.querySelector(".md-search__input"))
  const type = () => {
    input.focus()
    input.value = "%s"
    input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }))
  }
  const typing = setInterval(type, 1000)
  type()
  const link = await until(page => page.querySelector(".md-search-result__link"))
  clearInterval(typing)
  frame.onload = () => {
    const page = frame.contentDocument
    const heading = page.querySelector("h1").firstChild.data
    fetch("/opened?" + new URLSearchParams({ path: frame.contentWindow.location.pathname, heading }))
  }
  link.click()
}
</script>"""


def build(root):
    command = [VENV / "bin" / "python", "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )


def copy_to(folder):
    for name in ("docs", "benchmarks", "examples", "tools", ".github"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "shardcore").mkdir()
    shutil.copy(ROOT / "shardcore" / "version.py", folder / "shardcore")
    shutil.copy(ROOT / "pyproject.toml", folder)  # .github/SECURITY.md links to it
    for path in (*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "mkdocs.yml"):
        shutil.copy(path, folder)


needs_mkdocs = pytest.mark.skipif(
    not (VENV / "packages").exists(), reason="mkdocs is not there: run make docs first"
)


@pytest.mark.slow
@needs_mkdocs
def test_what_is_wrong_with_a_page_is_found(tmp_path):
    copy_to(tmp_path)
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    # a page that shows a file
    assert (tmp_path / "build" / "site" / "examples" / "cluster" / "slurm.sbatch.html").exists()
    site = tmp_path / "build" / "site"
    assert 'class="admonition note"' in (site / "tutorial.html").read_text()
    version = re.search(r'__version__ = "(.+)"', (ROOT / "shardcore/version.py").read_text())[1]
    assert f"shardcore {version}" in (site / "index.html").read_text()
    page = tmp_path / "docs" / "install.md"
    good = page.read_text()
    for fault, said in FAULTS.items():
        page.write_text(f"{good}\n{fault}")
        done = build(tmp_path)
        assert done.returncode != 0, fault
        assert said in done.stderr, done.stderr
    page.write_text(good)
    for name, (fault, said) in ELSEWHERE.items():
        original = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{original}\n{fault}")
        done = build(tmp_path)
        assert done.returncode != 0, name
        assert said in done.stderr, done.stderr
        (tmp_path / name).write_text(original)


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves the site and the page that searches it; `opened` gets what that page found."""

    def __init__(self, *args, page, opened, **kwargs):
        self.page, self.opened = page, opened
        super().__init__(*args, **kwargs)

    def do_GET(self):
        if self.path == "/searcher.html":
            body = self.page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        elif self.path.startswith("/opened?"):
            self.opened.append(parse_qs(urlsplit(self.path).query))
            self.opened_event.set()
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *args):
        pass


def first_result(site, word, folder):
    """Type a word into the site's search in a browser: where its first result leads."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser on PATH: {', '.join(BROWSERS)}")
    opened, Server.opened_event = [], threading.Event()
    handler = functools.partial(Server, directory=str(site), page=SEARCHER % word, opened=opened)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/searcher.html"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command = [browser, *options, f"--user-data-dir={folder}", "--remote-debugging-port=0", url]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                assert Server.opened_event.wait(120), f"{browser} opened no result"
            finally:
                process.kill()
                server.shutdown()
    return opened[0]


@pytest.mark.slow
@needs_mkdocs
def test_the_search_finds_a_page(tmp_path):
    copy_to(tmp_path)
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    found = first_result(tmp_path / "build" / "site", "pageable", tmp_path / "profile")
    (path,), (heading,) = found["path"], found["heading"]
    page = (tmp_path / "build" / "site" / path.lstrip("/")).read_text()
    assert "pageable" in page
    assert f'">{heading}<' in page
