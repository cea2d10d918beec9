"""Options: the table, its parsers, and what users see when they mistype."""

import pytest

from tsfuser import log, option_parsers, options


def test_nothing_set_gives_the_defaults():
    values = options.read({})
    assert values == {row.name: row.default for row in options.TABLE}
    assert values["cache_dir"].name == "tsfuser" and values["host_launch"] == "block"


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_variable_counts_as_unset(text):
    assert options.read({row.variable: text for row in options.TABLE}) == options.read({})


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(type(options.get("cache_dir")), "expanduser", homeless)
    with options.override(cache_dir=options.read({})["cache_dir"]):
        assert options.cache_dir().is_absolute() and "~" not in str(options.cache_dir())


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


def test_what_is_read_late_is_nvfusers():
    late = {row.variable for row in options.TABLE if row.is_late}
    assert {"PYTORCH_NVFUSER_DUMP", "PYTORCH_NVFUSER_DISABLE", "PYTORCH_NVFUSER_ENABLE"} <= late
    assert all(name.startswith("PYTORCH_NVFUSER_") for name in late)


def test_a_mistake_in_a_variable_that_is_read_late_leaves_the_rest():
    values, mistakes = options.read_late(
        {
            "PYTORCH_NVFUSER_DISABLE": "falback, fma, xyzzy(1)",
            "PYTORCH_NVFUSER_DISABLE_FALLBACK": "yes",
            "PYTORCH_NVFUSER_JIT_OPT_LEVEL": "2",
        }
    )
    assert values["disable"] == {"fma": ""} and values["no_fallback"] == 0 and values["opt_level"] == 2
    words, number = mistakes
    assert words.startswith(
        "ignored: PYTORCH_NVFUSER_DISABLE: unknown option 'falback'; did you mean 'fallback'?; unknown "
        "option 'xyzzy(1)'; known are: arch_check, "
    )
    assert number == "ignored: PYTORCH_NVFUSER_DISABLE_FALLBACK: 'yes' is not an integer"


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
    with pytest.raises(options.OptionError, match="TSFUSER_HOST_LAUNCH: 'threads' is none of: block, fibers"):
        options.read({"TSFUSER_HOST_LAUNCH": "threads"})


@pytest.mark.parametrize("text", ["-5", "0", "256", "-1", "many"])
def test_a_number_of_registers_that_no_kernel_can_have_is_an_error(text):
    reason = "is not an integer" if text == "many" else "is not a number of registers from 1 to 255"
    with pytest.raises(options.OptionError, match=f"PYTORCH_NVFUSER_MAX_REG_COUNT: '{text}' {reason}"):
        options.read({"PYTORCH_NVFUSER_MAX_REG_COUNT": text})


@pytest.mark.parametrize("text, count", [("1", 1), ("64", 64), ("255", 255), (" ", None)])
def test_numbers_of_registers(text, count):
    assert options.read({"PYTORCH_NVFUSER_MAX_REG_COUNT": text})["max_registers"] == count


@pytest.mark.parametrize(
    "variable, text, like",
    [
        ("PYTORCH_NVFUSER_DUMP", "cuda_kernal", "cuda_kernel"),
        ("PYTORCH_NVFUSER_DUMP", "fusion_ir,Kernel_IR", "kernel_ir"),
        ("PYTORCH_NVFUSER_DUMP", "ptxx(1)", "ptx"),
        ("PYTORCH_NVFUSER_DISABLE", "falback", "fallback"),
        ("PYTORCH_NVFUSER_ENABLE", "graph_ops_fusion", "graph_op_fusion"),
        ("PYTORCH_JIT_LOG_LEVEL", "graph_fuser:>partitions", "partition"),
        ("PYTORCH_JIT_LOG_LEVEL", ">>kernelcache", "kernel_cache"),
        ("TSFUSER_HOST_LAUNCH", "fiber", "fibers"),
    ],
)
def test_a_word_that_is_nearly_right_is_asked_back(variable, text, like):
    with pytest.raises(options.OptionError, match=f"^{variable}: .*did you mean '{like}'\\?"):
        options.read({variable: text})


@pytest.mark.parametrize(
    "name, prefix, like",
    [
        ("TSFUSER_CACHE", "TSFUSER_", "; did you mean 'TSFUSER_CACHE_DIR'?"),
        ("TSFUSER_HOSTLAUNCH", "TSFUSER_", "; did you mean 'TSFUSER_HOST_LAUNCH'?"),
        ("TSFUSER_XYZZY", "TSFUSER_", ""),
        ("TSFUSER_FAST_MAHT", "TSFUSER_", ""),  # nothing but its prefix is like that of an option
        ("PYTORCH_NVFUSER_DUMPS", "PYTORCH_NVFUSER_", "; did you mean 'PYTORCH_NVFUSER_DUMP'?"),
    ],
)
def test_a_variable_that_is_no_option_is_named(name, prefix, like):
    environment = {name: "1", "PATH": "/bin", "TSFUSER_PROGRESS": "0", "PYTORCH_NVFUSER_ENABLE": "complex"}
    assert options.unknown(environment, prefix) == [f"{name} is no option of tsfuser{like}"]


def test_nothing_is_asked_back_where_nothing_is_like_it():
    with pytest.raises(options.OptionError) as error:
        options.read({"PYTORCH_NVFUSER_DUMP": "xyzzy"})
    assert "did you mean" not in str(error.value)


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


def test_files_of_torchs_own_may_be_logged():
    """torch reads the same variable."""
    text = "dead_code_elimination:>profiling_graph_executor_impl:>>irparser"
    assert set(options.read({"PYTORCH_JIT_LOG_LEVEL": text})["log_levels"]) == {
        "dead_code_elimination", "profiling_graph_executor_impl", "irparser"
    }  # fmt: skip


@pytest.mark.parametrize("text", ["nonsense", "partition,graph_fuser", "graph_fuser:1", "*"])
def test_an_unknown_log_is_an_error_that_lists_all(text):
    with pytest.raises(
        options.OptionError, match=r"PYTORCH_JIT_LOG_LEVEL: unknown log .*graph_fuser, partition"
    ):
        options.read({"PYTORCH_JIT_LOG_LEVEL": text})


def test_an_unknown_level_of_a_log_is_an_error():
    with pytest.raises(
        options.OptionError, match="unknown level; there are: partition, >partition and >>part"
    ):
        options.read({"PYTORCH_JIT_LOG_LEVEL": ">>>partition"})


def test_the_logs_are_those_that_are_written():
    """By the names that `log.write` and `log.enabled` get, in all files."""
    import re
    from pathlib import Path

    files = Path(options.__file__).parent.rglob("*.py")
    found = {m for f in files for m in re.findall(r'log\.(?:write|enabled)\(\s*"(\w+)"', f.read_text())}
    assert found == set(option_parsers.LOGS)


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


@pytest.mark.parametrize(
    "text, size", [("0", 0), ("17", 17), ("500K", 500 << 10), ("2 m", 2 << 20), ("4GiB", 4 << 30)]
)
def test_a_size_has_a_unit(text, size):
    assert options.read({"TSFUSER_CACHE_LIMIT": text})["cache_limit"] == size


@pytest.mark.parametrize("text", ["much", "-1", "1.5G", "4T"])
def test_other_sizes_are_refused(text):
    with pytest.raises(option_parsers.OptionError, match="is no size, as 500K, 200M or 1G are"):
        option_parsers.size(text)
