"""Files of one save beside files of other tags, without ranks."""

from smddp.modelparallel.checkpointing import saved_files

SAVE, OTHER = "0123456789ab", "ba9876543210"


def test_a_rename_keeps_temporary_files_of_other_tags(tmp_path):
    for tag in ("ckpt", "ckpt.best"):
        saved_files.temporary(tmp_path / tag, SAVE if tag == "ckpt" else OTHER).write_text(tag)
    interrupted = saved_files.temporary(tmp_path / "ckpt", OTHER)
    interrupted.write_text("an interrupted save")
    saved_files.rename([tmp_path / "ckpt"], SAVE)
    assert (tmp_path / "ckpt").read_text() == "ckpt"
    assert saved_files.temporary(tmp_path / "ckpt.best", OTHER).read_text() == "ckpt.best"
    assert not interrupted.exists()


def test_a_manifest_lists_files_of_a_tag_in_a_folder(tmp_path):
    manifest = saved_files.manifest_of(tmp_path, "run/100", partial=False)
    saved_files.write_manifest(manifest, SAVE, ["run/100"], content=False)
    (tmp_path / "run").mkdir(exist_ok=True)
    saved_files.temporary(tmp_path / "run" / "100", SAVE).write_text("values")
    found = saved_files.of(tmp_path, "run/100", partial=False)
    assert found.has("run/100") and found.path("run/100").read_text() == "values"
