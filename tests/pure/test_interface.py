"""The digest of the extension's interface: it changes with names, and with nothing else."""

import pytest

from tsfuser import interface

TEXT = """
void bind(py::module_& m) {
  // about it
  m.def("run", &run, py::arg("plan"));
  m.attr("most") = 3;
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def_readonly("name", &Plan::name);
}
"""


def digest(folder, text):
    path = folder / "csrc_stubs" / "bindings" / "a.cpp"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return interface.digest(folder / "csrc_stubs")


@pytest.mark.parametrize("name", ["run", "plan", "most", "Plan", "name"])
def test_a_name_that_changes_changes_it(tmp_path, name):
    assert digest(tmp_path, TEXT) != digest(tmp_path, TEXT.replace(f'"{name}"', '"changed"'))


def test_a_body_or_comment_that_changes_does_not(tmp_path):
    changed = TEXT.replace("about it", "nothing").replace("&run", "&run_it").replace("= 3", "= 4")
    assert digest(tmp_path, TEXT) == digest(tmp_path, changed)


def test_without_sources_there_is_no_mistake(tmp_path):
    """As where it is installed."""
    assert interface.mistake(None, tmp_path / "tsfuser") == ""


def test_a_mistake_says_what_to_run(tmp_path):
    built = digest(tmp_path, TEXT)
    assert interface.mistake(built, tmp_path / "tsfuser") == ""
    digest(tmp_path, TEXT.replace("most", "least"))
    assert f"`python setup.py build_ext --inplace` in {tmp_path}" in interface.mistake(
        built, tmp_path / "tsfuser"
    )
