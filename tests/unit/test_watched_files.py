"""Files that somebody else renews."""

from pathlib import Path

from service.watched_files import WatchedFiles


def test_what_is_written_replaced_removed_or_given_to_others_has_changed_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one")
    watched = WatchedFiles(path)
    assert not watched.changed()

    def replace() -> None:
        (tmp_path / "next").write_text("two")
        (tmp_path / "next").replace(path)

    for change in (lambda: path.write_text("three"), replace, lambda: path.chmod(0o600), path.unlink, path.touch):
        change()
        assert [watched.changed(), watched.changed()] == [True, False]
