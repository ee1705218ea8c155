"""A manifest names a folder's files in one order, stays inside it, and reads back from its own JSON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelpress.digests import digest_bytes
from modelpress.errors import InvalidRequest
from modelpress.manifests import MAX_FILES, FileEntry, Manifest, check_relative_path, scan_folder


def entry(path: str, data: bytes = b"x") -> FileEntry:
    return FileEntry(path, len(data), digest_bytes(data))


def test_the_order_given_does_not_change_the_digest() -> None:
    files = [entry("b"), entry("a/c"), entry("a/b", b"yy")]
    assert Manifest(tuple(files)).digest == Manifest(tuple(reversed(files))).digest
    assert Manifest(tuple(files)).size_bytes == 4


def test_the_digest_is_that_of_the_canonical_json() -> None:
    manifest = Manifest((entry("a"),))
    digest = digest_bytes(b"x")
    assert manifest.to_json() == f'{{"files":[{{"digest":"{digest}","path":"a","size_bytes":1}}]}}'.encode()
    assert manifest.digest == digest_bytes(manifest.to_json())


def test_it_reads_back_from_its_own_json() -> None:
    manifest = Manifest((entry("a"), entry("ü/b.txt")))
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\\b", "a\x00", "a\nb", "x" * 513, "a/./b"]
)
def test_a_path_that_could_leave_its_folder_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match="plain relative path"):
        check_relative_path(path)


@pytest.mark.parametrize("path", ["a", "a/b", ".hidden", "..a", "a b", "ü"])
def test_any_other_path_is_allowed(path: str) -> None:
    assert check_relative_path(path) == path


@pytest.mark.parametrize(
    ("files", "mentions"),
    [
        ((), "empty"),
        ((entry("a"), entry("a", b"y")), "twice"),
        ((entry("a"), entry("a/b")), "both as a file and as a folder"),
        (tuple(entry(str(i)) for i in range(MAX_FILES + 1)), "at most"),
    ],
)
def test_files_that_no_folder_can_hold_are_refused(files: tuple[FileEntry, ...], mentions: str) -> None:
    with pytest.raises(InvalidRequest, match=mentions):
        Manifest(files)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=">= 0"):
        FileEntry("a", -1, digest_bytes(b""))


def test_a_scan_finds_hidden_files_and_nested_ones(tmp_path: Path) -> None:
    for path in (".git/HEAD", "a/b/c", "d"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(path.encode())
    manifest = scan_folder(tmp_path)
    assert [file.path for file in manifest.files] == [".git/HEAD", "a/b/c", "d"]
    assert manifest.entry("d") == entry("d", b"d")
    assert manifest.entry("e") is None


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(InvalidRequest, match="'link' is a link"):
        scan_folder(tmp_path)
    (tmp_path / "link").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="'pipe' is a link or a special file"):
        scan_folder(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="not a folder"):
        scan_folder(tmp_path / "missing")
