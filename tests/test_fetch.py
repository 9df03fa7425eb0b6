"""Public data by name, from a server on this machine: whole files or none, known hashes, gone on with where stopped."""

import dataclasses
import fcntl
import hashlib
import http.server
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mtraining_nns import cli
from mtraining_nns.errors import UserError
from mtraining_nns.eval import fetch, infinitebench_rows
from mtraining_nns.eval.fetch import File, Source

GOOD = bytes(range(256)) * 40
SHA256 = hashlib.sha256(GOOD).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Gives server.content: whole, cut after server.cut bytes, or halted there until the client is gone."""

    def do_GET(self):
        asked, name = self.headers.get("Range"), self.path.rsplit("/", 1)[1]
        self.server.asked.append((name, asked))
        body = self.server.content.get(name)
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and self.server.ranges else 0
        if body is None or (start and start >= len(body)):
            return self.send_error(404 if body is None else 416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : self.server.cut])
        self.server.halt.wait(20)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.content, server.cut, server.ranges, server.asked = {"a.txt": GOOD}, None, True, []
        server.halt = threading.Event()
        server.halt.set()
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.halt.set()
        server.shutdown()
        thread.join()


def source(server, *names: str, sha256: str | None = SHA256, size_bytes: int | None = None) -> Source:
    files = tuple(File(name, (f"{server.url}/{name}",), sha256, size_bytes) for name in names or ("a.txt",))
    return Source("books", "some books; public domain", "nobody", files)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_fetch_asks_and_touches_nothing(server, tmp_path):
    server.content["b.txt"] = GOOD
    both = source(server, "a.txt", "b.txt", size_bytes=len(GOOD))
    assert fetch.fetch(both, tmp_path / "books") == [tmp_path / "books" / "a.txt", tmp_path / "books" / "b.txt"]
    assert left(tmp_path / "books") == ["a.txt", "b.txt"]
    before = [path.stat() for path in sorted((tmp_path / "books").iterdir())]
    server.asked.clear()
    assert fetch.fetch(both, tmp_path / "books") == []
    assert server.asked == [] and [path.stat().st_mtime_ns for path in sorted((tmp_path / "books").iterdir())] == [
        one.st_mtime_ns for one in before
    ]
    assert (tmp_path / "books" / "a.txt").read_bytes() == GOOD


def test_what_is_there_is_kept_and_the_rest_is_fetched(server, tmp_path):
    server.content["b.txt"] = GOOD
    (tmp_path / "a.txt").write_bytes(GOOD)
    assert fetch.fetch(source(server, "a.txt", "b.txt"), tmp_path) == [tmp_path / "b.txt"]
    assert server.asked == [("b.txt", None)]


def test_a_wrong_hash_leaves_nothing(server, tmp_path):
    server.content["a.txt"] = GOOD[:-1] + b"x"
    found = hashlib.sha256(server.content["a.txt"]).hexdigest()
    with pytest.raises(UserError, match=f"a.txt.*{found}, expected {SHA256} .published.*by hand"):
        fetch.fetch(source(server), tmp_path)
    assert left(tmp_path) == []


def test_a_file_that_is_there_and_differs_is_not_overwritten(server, tmp_path):
    (tmp_path / "a.txt").write_text("my own")
    with pytest.raises(UserError, match=f"a.txt has sha256 .*, expected {SHA256} .published.; remove it"):
        fetch.fetch(source(server), tmp_path)
    assert (tmp_path / "a.txt").read_text() == "my own" and server.asked == []


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "whole files only"])
def test_a_cut_download_is_gone_on_with(server, tmp_path, ranges):
    server.cut, server.ranges = 4000, ranges
    with pytest.raises(UserError, match=f"ended after 4000 of {len(GOOD)} bytes.; run it again to go on"):
        fetch.fetch(source(server), tmp_path)
    assert left(tmp_path) == [".a.txt.partial"]
    server.cut = None
    fetch.fetch(source(server), tmp_path)
    assert server.asked == [("a.txt", None), ("a.txt", "bytes=4000-")]
    assert left(tmp_path) == ["a.txt"] and (tmp_path / "a.txt").read_bytes() == GOOD


def test_a_killed_download_is_gone_on_with(server, tmp_path):
    server.cut = 4000
    server.halt.clear()
    file = File("a.txt", (f"{server.url}/a.txt",), SHA256)
    code = f"""
from pathlib import Path
from mtraining_nns.eval.fetch import File, Source, fetch
fetch(Source("books", "", "", ({file!r},)), Path({str(tmp_path)!r}))
"""
    partial, child = tmp_path / ".a.txt.partial", subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 30
    while not (partial.exists() and partial.stat().st_size == 4000):
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert left(tmp_path) == [".a.txt.partial"]
    server.cut = None
    server.halt.set()
    fetch.fetch(source(server), tmp_path)
    assert server.asked[-1] == ("a.txt", "bytes=4000-")
    assert left(tmp_path) == ["a.txt"] and (tmp_path / "a.txt").read_bytes() == GOOD


def test_a_download_stopped_before_its_rename_needs_no_network(server, tmp_path):
    (tmp_path / ".a.txt.partial").write_bytes(GOOD)
    fetch.fetch(source(server), tmp_path)
    assert server.asked == [] and left(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("rest", [b"another file", GOOD + b"longer"], ids=["another", "longer"])
def test_a_bad_rest_is_thrown_away(server, tmp_path, rest):
    (tmp_path / ".a.txt.partial").write_bytes(rest)
    with pytest.raises(UserError):
        fetch.fetch(source(server), tmp_path)
    assert left(tmp_path) == []
    fetch.fetch(source(server), tmp_path)
    assert (tmp_path / "a.txt").read_bytes() == GOOD


def test_the_next_address_is_tried(server, tmp_path):
    urls = (f"{server.url}/missing.txt", f"{server.url}/cut.txt", f"{server.url}/a.txt")
    server.content["cut.txt"] = GOOD[:100]
    file = File("a.txt", urls, SHA256, len(GOOD))
    fetch.fetch(Source("books", "", "", (file,)), tmp_path)
    assert server.asked == [("missing.txt", None), ("cut.txt", None), ("a.txt", "bytes=100-")]
    assert (tmp_path / "a.txt").read_bytes() == GOOD


def test_two_runs_do_not_write_one_file(server, tmp_path):
    with open(tmp_path / ".a.txt.partial", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run is fetching .*a.txt; wait for it"):
            fetch.fetch(source(server), tmp_path)
    assert server.asked == []


def test_a_silent_server_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", 0.2)
    server.cut = 4000
    server.halt.clear()
    with pytest.raises(UserError, match=f"{server.url}/a.txt: timed out"):
        fetch.fetch(source(server), tmp_path)
    assert (tmp_path / ".a.txt.partial").stat().st_size == 4000


def test_a_file_without_a_hash_is_remembered_and_then_enforced(server, tmp_path):
    said, unknown = [], source(server, sha256=None)
    fetch.fetch(unknown, tmp_path, said.append)
    assert json.loads((tmp_path / "fetched.json").read_text()) == {"a.txt": SHA256}
    assert len(said) == 1 and "no sha256 was published" in said[0] and SHA256 in said[0] and "fetched.json" in said[0]
    fetch.fetch(unknown, tmp_path, said.append)
    assert len(said) == 1

    server.content["a.txt"] = b"another release"
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=f"expected {SHA256} .kept in .*fetched.json"):
        fetch.fetch(unknown, tmp_path, said.append)
    (tmp_path / "a.txt").write_bytes(b"another release")
    with pytest.raises(UserError, match=f"a.txt has sha256 .*expected {SHA256} .kept in .*fetched.json.; remove it"):
        fetch.fetch(unknown, tmp_path, said.append)


def test_a_file_without_a_hash_is_never_joined_from_two_downloads(server, tmp_path):
    (tmp_path / ".a.txt.partial").write_bytes(b"older release")
    fetch.fetch(source(server, sha256=None), tmp_path, lambda line: None)
    assert server.asked == [("a.txt", None)] and (tmp_path / "a.txt").read_bytes() == GOOD


def test_a_file_put_there_by_hand_is_trusted_once(server, tmp_path):
    (tmp_path / "a.txt").write_bytes(GOOD)
    assert fetch.fetch(source(server, sha256=None), tmp_path, lambda line: None) == []
    assert server.asked == [] and json.loads((tmp_path / "fetched.json").read_text()) == {"a.txt": SHA256}


@pytest.fixture
def table(server, monkeypatch):
    """The command line's table: one source of one file."""
    known = {"books": source(server)}
    monkeypatch.setattr(fetch, "sources", lambda: known)
    return known


def test_the_command_says_what_it_did(table, tmp_path, capsys):
    assert cli.main(["fetch", "books", "books", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "some books; public domain; hashes: nobody",
        f"{tmp_path}/books: 1 files, 1 fetched, 0 were there",
    ]


def test_the_command_reports_in_one_line(server, table, tmp_path, capsys):
    def error(*words: str) -> str:
        assert cli.main(["fetch", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("mtraining: error: ") and printed.count("\n") == 1
        return printed

    assert "unknown data 'films'; fetch takes books" in error("books", "films", "--out", str(tmp_path))
    assert left(tmp_path) == []
    (tmp_path / "file").write_text("")
    assert "choose another --out" in error("books", "--out", str(tmp_path / "file"))
    server.content.clear()
    assert f"{server.url}/a.txt: HTTP 404" in error("books", "--out", str(tmp_path))
    table["books"] = dataclasses.replace(table["books"], files=(File("a.txt", ("http://127.0.0.1:9/a.txt",), SHA256),))
    printed = error("books", "--out", str(tmp_path))
    assert "http://127.0.0.1:9/a.txt" in printed and f"put the file at {tmp_path}/books/a.txt by hand" in printed
    (tmp_path / "books" / "fetched.json").write_text("{")
    assert "fetched.json is no JSON file" in error("books", "--out", str(tmp_path))


def test_the_table_is_well_formed():
    table = fetch.sources()
    assert {name: len(found.files) for name, found in table.items()} == {
        "squad": 2,
        "hotpotqa": 1,
        "essays": 49,
        "pg19": 100,
        "infinitebench": 12,
    }
    files = [file for found in table.values() for file in found.files]
    assert all(re.fullmatch(r"[A-Za-z0-9][\w.-]*\.(txt|json|jsonl)", file.name) for file in files)
    assert all(
        re.fullmatch(r"https://[\w./-]+", url) and url.endswith(file.name) for file in files for url in file.urls
    )
    assert [file.name for file in files if file.sha256 is None] == ["math_calc.jsonl"]
    hashes = [file.sha256 for file in files if file.sha256 is not None]
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in hashes) and len(set(hashes)) == len(hashes)
    assert all(file.size_bytes is None or file.size_bytes > 0 for file in files)
    assert all(found.note and found.hashes and found.files for found in table.values())
    assert {file.name for file in table["infinitebench"].files} == {
        task["file"] for task in infinitebench_rows.tables().values()
    }


def test_revisions_of_changing_places_are_pinned():
    places = [url for found in fetch.sources().values() for url in found.files[0].urls]
    changing = [url for url in places if "huggingface.co" in url or "github" in url and "github.io" not in url]
    assert len(changing) == 3 and all(re.search("/[0-9a-f]{40}/", url) for url in changing)
