"""Options: the table, its parsers, and what users see when they mistype."""

import pytest

from tsfuser import log, options


def test_nothing_set_gives_the_defaults():
    values = options.read({})
    assert values == {row.name: row.default for row in options.TABLE}
    assert values["cache_dir"].name == "tsfuser" and values["host_launch"] == "block"


def test_the_table_is_small_and_has_no_name_twice():
    assert len(options.TABLE) < 25
    for column in ("name", "variable"):
        names = [getattr(row, column) for row in options.TABLE]
        assert len(set(names)) == len(names)
    assert all(row.doc.endswith(".") for row in options.TABLE)


def test_words_may_carry_arguments():
    values = options.read(
        {
            "PYTORCH_NVFUSER_DUMP": "cuda_kernel, fusion_ir",
            "PYTORCH_NVFUSER_ENABLE": "warn_register_spill(3),complex",
        }
    )
    assert values["dump"] == {"cuda_kernel": "", "fusion_ir": ""}
    assert values["enable"] == {"warn_register_spill": "3", "complex": ""}


@pytest.mark.parametrize(
    "variable, known", [("DUMP", "cuda_kernel"), ("DISABLE", "fallback"), ("ENABLE", "kernel_db")]
)
def test_an_unknown_word_is_an_error_that_lists_all(variable, known):
    with pytest.raises(
        options.OptionError,
        match=rf"PYTORCH_NVFUSER_{variable}: unknown option 'nonsense'; known are: .*{known}",
    ):
        options.read({f"PYTORCH_NVFUSER_{variable}": "nonsense"})


def test_words_without_a_meaning_here_are_named():
    values = options.read(
        {"PYTORCH_NVFUSER_DUMP": "halo,cuda_kernel", "PYTORCH_NVFUSER_DISABLE": "magic_zero"}
    )
    assert options.inert(values) == ["PYTORCH_NVFUSER_DUMP=halo", "PYTORCH_NVFUSER_DISABLE=magic_zero"]


@pytest.mark.parametrize(
    "text, on", [("0", False), ("OFF", False), ("off", False), ("1", True), ("ON", True), ("yes", True)]
)
def test_enable_variable(text, on):
    assert options.read({"PYTORCH_JIT_ENABLE_NVFUSER": text})["on_at_import"] is on


@pytest.mark.parametrize("text, on", [("1", True), ("on", True), ("0", False), ("yes", False)])
def test_nnc_variable_wants_one_or_on(text, on):
    assert options.read({"PYTORCH_JIT_USE_NNC_NOT_NVFUSER": text})["use_nnc"] is on


@pytest.mark.parametrize("changed", [{"disable": {"fallback": ""}}, {"no_fallback": 1}])
def test_two_ways_to_disable_the_fallback(changed):
    assert options.fallback_enabled()
    with options.override(**changed):
        assert not options.fallback_enabled()
    assert options.fallback_enabled()


def test_variables_without_a_meaning_here_are_named():
    values = options.read({"PYTORCH_NVFUSER_TRACE": "trace.json", "TORCH_NVFUSER_LIBRARY_PATH": "/nowhere"})
    assert options.inert(values) == ["PYTORCH_NVFUSER_TRACE", "TORCH_NVFUSER_LIBRARY_PATH"]


@pytest.mark.parametrize("text, level", [("0", 0), ("4", 4), ("", None)])
def test_levels_of_optimisation(text, level):
    assert options.read({"PYTORCH_NVFUSER_JIT_OPT_LEVEL": text})["opt_level"] == level


def test_numbers_and_choices_are_checked():
    with pytest.raises(options.OptionError, match="JIT_OPT_LEVEL: '5' is not a level from 0 to 4"):
        options.read({"PYTORCH_NVFUSER_JIT_OPT_LEVEL": "5"})
    with pytest.raises(
        options.OptionError, match="PYTORCH_NVFUSER_DISABLE_FALLBACK: 'yes' is not an integer"
    ):
        options.read({"PYTORCH_NVFUSER_DISABLE_FALLBACK": "yes"})
    with pytest.raises(
        options.OptionError, match="TSFUSER_HOST_LAUNCH: 'threads' is none of: block, fibers"
    ):
        options.read({"TSFUSER_HOST_LAUNCH": "threads"})


def test_a_question_about_an_unknown_word_is_an_error():
    """A layer that asks for a mistyped word would else never print."""
    for question in (options.dump, options.disabled):
        with pytest.raises(options.OptionError):
            question("cuda_kernels")
    with pytest.raises(options.OptionError), options.override(host_lunch="block"):
        pass


@pytest.mark.parametrize(
    "state, environment, on",
    [
        (None, {}, False),
        (None, {"on_at_import": True}, True),
        (False, {"on_at_import": True}, False),
        (True, {}, True),
        (True, {"use_nnc": True}, False),
    ],
)
def test_precedence_of_the_switches(monkeypatch, state, environment, on):
    """NNC's variable, then what was last set, then the enabling variable; else off."""
    monkeypatch.setattr(options.state, "enabled", state)
    with options.override(**environment):
        assert options.fusion_enabled() is on


def test_log_levels_have_torchs_grammar():
    levels = options.read({"PYTORCH_JIT_LOG_LEVEL": ">partition:graph_fuser:>>kernel_cache.cpp"})[
        "log_levels"
    ]
    assert levels == {"partition": 1, "graph_fuser": 0, "kernel_cache": 2}


def test_log_writes_title_and_text_when_asked(capsys):
    with options.override(log_levels={"graph_fuser": 0, "partition": 1}):
        log.write("graph_fuser", "Before Fusion", "graph(%x : Tensor):\n  return (%x)\n")
        log.write("graph_fuser", "too deep", level=log.UPDATE)
        log.write("partition", "aten::sort is not fused", level=log.UPDATE)
        log.write("manager", "not asked for")
        assert not log.enabled("graph_fuser", log.UPDATE) and log.enabled("partition")
    assert capsys.readouterr().err == (
        "[graph_fuser] Before Fusion:\ngraph(%x : Tensor):\n  return (%x)\n"
        "[partition] aten::sort is not fused\n"
    )
