"""`longring plan`, the real command, as a user runs it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longring.cli import main
from longring.cli.plan_page import grouped
from longring.geometry.plans import PLANS
from longring.plan.hardware import BUILT_IN, all_hardware

DOCS = Path(__file__).parents[2] / "docs"
OF_THE_ISSUE = (
    "--tokens 1M --ranks 64 --nodes 8 --heads 32 --kv-heads 8 --head-dim 128 --layers 32 --dtype bf16 --causal"
)
ASKED = (*OF_THE_ISSUE.split(), "--hardware", "h200")
SMALL = ("--tokens", "64K", "--ranks", "4", "--heads", "8", "--kv-heads", "2")


def longring(*arguments, python=()):
    command = [sys.executable, *python, "-m", "longring", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "NO_COLOR": "1"})


def told(*arguments):
    done = longring(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def printed():
    done = longring(*ASKED, python=("-X", "importtime"))
    assert done.returncode == 0
    return done


@pytest.fixture(scope="module")
def as_json():
    return told(*ASKED)


# ------------------------------------------------------------------------------------------------ the page


def test_nothing_heavy_is_loaded(printed):
    """Least of all to read words and to print them."""
    imported = {line.rsplit("|", 1)[-1].strip() for line in printed.stderr.splitlines()}
    assert "longring.plan.forecast" in imported
    assert not imported & {"torch", "numpy", "matplotlib", "pydantic", "rich"}


def test_the_page_answers_what_was_asked(printed):
    text = printed.stdout
    assert text.startswith("1,000,000 tokens, causal, over 64 ranks on 8 nodes: 15,625 a rank.\n")
    assert "Predicted; nothing was run." in text
    assert "\nTake " in text
    assert "The longest that fits by " in text
    for name in PLANS:
        assert f"\n{name} zigzag " in text
    assert "\nring contiguous " in text
    assert "Weights, optimizer and the rest of a model are not" in " ".join(text.split())


def test_tables_fit_100_columns_and_are_plain_where_nobody_looks(printed):
    assert max(map(len, printed.stdout.splitlines())) <= 100
    assert "\x1b" not in printed.stdout
    assert "…" not in printed.stdout


@pytest.mark.parametrize(
    "more",
    [
        ("--window", "4096", "--ranks", "16"),
        ("--full",),
        ("--dilated", "2048:1,4096:2", "--ranks", "3"),
        ("--tokens", "3", "--ranks", "8"),
        ("--ranks", "1"),
        ("--layout", "striped", "--schedule", "ring"),
        ("--hardware", "cpu", "--dtype", "fp32"),
    ],
)
def test_pages_of_all_kinds_fit(more):
    done = longring(*SMALL, *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_groups_leave_nothing_out(as_json):
    for one in as_json["choices"]:
        for phase in ("forward", "backward"):
            assert sum(grouped(one[phase]["components"]).values()) == one[phase]["peak_bytes"]


# ---------------------------------------------------------------------------------------------------- the JSON


def test_json_has_the_envelope(as_json):
    assert as_json["command"] == "plan"
    assert as_json["arguments"]["tokens"] == 10**6
    assert "nothing" in as_json["real"]
    assert "counted" in as_json["simulated"]
    assert {"versions", "machine"} <= set(as_json)


def test_json_has_every_choice(as_json):
    found = [(one["schedule"], one["layout"]) for one in as_json["choices"]]
    assert found == [*((name, "zigzag") for name in PLANS), ("ring", "contiguous")]
    for one in as_json["choices"]:
        assert 0 < one["efficiency"] <= 1.01
        assert one["balance"] >= 1
        assert one["fits"] is True
        assert one["step_seconds"] == pytest.approx(32 * one["seconds"])
        memory = one["memory"]
        assert memory["peak_bytes"] == 31 * memory["saved_bytes_of_a_layer"] + sum(memory["components"].values())
        for phase in ("forward", "backward"):
            assert one[phase]["seconds"] >= one[phase]["computing_seconds"] > 0
            sent = one["traffic"][phase]["sent"]
            assert one[phase]["bytes_sent"] == sum(way["bytes"] for way in sent.values())


def test_json_recommends_with_a_reason(as_json):
    best = as_json["recommended"]
    taken = next(
        one for one in as_json["choices"] if (one["schedule"], one["layout"]) == (best["schedule"], best["layout"])
    )
    assert taken["is_played"] is True
    assert taken["seconds"] <= 1.02 * min(one["seconds"] for one in as_json["choices"])
    assert len(best["reason"].split()) > 5
    assert as_json["longest_tokens"] > 10**6


def test_json_names_the_sources_of_its_rates(as_json):
    assert "docs/records/h200.json" in as_json["hardware"]["sources"]["forward_flops"]


# ------------------------------------------------------------------------------------- how long, and how many


def test_how_long_can_i_go():
    found = told("--max-tokens", "--ranks", "2", "--layers", "8", "--kv-heads", "8")
    assert found["longest_tokens"] == max(one["tokens"] for one in found["longest"])
    for one in found["longest"]:
        assert one["bytes_at"] <= found["memory_bytes"] < one["bytes_beyond"]
    assert found["choices"][0]["tokens"] == found["longest_tokens"]
    more_set_aside = told("--max-tokens", "--ranks", "2", "--layers", "8", "--kv-heads", "8", "--reserve", "100GiB")
    assert more_set_aside["longest_tokens"] < found["longest_tokens"]
    page = longring("--max-tokens", "--ranks", "2", "--layers", "8", "--kv-heads", "8")
    assert f"{found['longest_tokens']:,}" in page.stdout


def test_how_many_do_i_need():
    found = told("--fit", "--tokens", "1M", "--layers", "32", "--kv-heads", "8")
    assert found["fewest_ranks"] > found["fewer_ranks"] > 0
    assert found["bytes_with_fewer"] > found["memory_bytes"]
    assert any(one["fits"] for one in found["choices"])
    page = longring("--fit", "--tokens", "1M", "--layers", "32", "--kv-heads", "8")
    assert f"{found['fewest_ranks']} ranks on " in page.stdout


# -------------------------------------------------------------------------------------------------- hardware


def test_a_node_of_more_ranks_than_there_are_is_told():
    page = longring("--tokens", "1", "--ranks", "64", "--nodes", "1", "--heads", "7", "--kv-heads", "1").stdout
    assert page.startswith("1 token, causal, over 64 ranks")
    assert "7 query and 1 kv head of 128" in page
    assert "64 ranks share a node here, joined by nvlink4; of h200 8 do." in page


def test_of_fewer_tokens_than_ranks_no_balance_is_told():
    page = longring("--tokens", "3", "--ranks", "8").stdout
    assert page.startswith("3 tokens, causal, over 8 ranks: 1 a rank at most, and 5 ranks without any.")
    (row,) = (line.split() for line in page.splitlines() if line.startswith("ring zigzag") and line.endswith("yes"))
    assert row[-4] == "-"  # before what it holds, the unit of that, and whether it fits
    assert "over 8 ranks: 1 a rank." in longring("--tokens", "8", "--ranks", "8").stdout


def test_a_slip_of_the_keyboard_is_told_in_few_digits():
    page = longring("--tokens", "1000000000000000", "--ranks", "2", "--schedule", "ring").stdout
    times, _, _ = page.partition("What a rank sends")
    assert max(map(len, times.splitlines())) <= 110
    assert "nothing fits" in page
    assert "e+18 s" in times


def test_windows_on_a_gpu_are_called_rough():
    shape = ("--tokens", "64K", "--ranks", "2", "--schedule", "ring")
    rough = "computed in fewer launches"
    assert rough in " ".join(longring(*shape, "--window", "4096").stdout.split())
    assert rough not in " ".join(longring(*shape).stdout.split())
    assert rough not in " ".join(longring(*shape, "--window", "4096", "--hardware", "cpu").stdout.split())


def test_one_schedule_alone_is_that_one_to_the_last_line():
    shape = ("--tokens", "64K", "--ranks", "4", "--heads", "8", "--dilated", "2048:1,4096:2")
    assert told(*shape, "--schedule", "ulysses")["longest"]["schedule"] == "ulysses"


def test_hardware_is_listed():
    page, found = longring("--hardware", "list"), told("--hardware", "list")
    assert page.returncode == 0
    assert max(map(len, page.stdout.splitlines())) <= 100
    assert list(found["hardware"]) == list(all_hardware())
    for name in all_hardware():
        assert f"\n{name} " in page.stdout


def test_hardware_of_ones_own(tmp_path):
    text = BUILT_IN.read_text().replace("hardware.h200", "hardware.mine").replace("147.9e9", "1e12")
    (tmp_path / "my.toml").write_text(text)
    found = told(*SMALL, "--hardware-file", str(tmp_path / "my.toml"), "--hardware", "mine")
    assert found["hardware"]["memory_bytes"] == 10**12


def test_other_links_make_other_times():
    fast, slow = (
        told(*SMALL, "--schedule", "gather", "--nodes", "2", "--outside", link) for link in ("ndr", "ethernet10")
    )
    assert fast["hardware"]["outside"]["name"] == "ndr"
    assert slow["hardware"]["outside"]["name"] == "ethernet10"
    assert fast["choices"][0]["seconds"] < slow["choices"][0]["seconds"]


# ------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def refused(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["longring", "plan", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        assert (stopped.value.code, printed.out) == (2, "")
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        return printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--hardware h300", "'h300' is unknown; there is h200, h100, a100, b200, rtx4090, gtx1080, cpu"),
        ("--heads 0", "--heads must be a whole number from 1"),
        ("--heads 8 --kv-heads 3", "--heads must be a multiple of --kv-heads, got 8 and 3"),
        ("--ranks 8 --nodes 3", "--ranks must be a multiple of --nodes, got 8 and 3"),
        ("--ranks 9", "--ranks 9 do not spread evenly over 2 nodes of up to 8 (h200)"),
        ("--tokens 1X", "--tokens must be a number like"),
        ("--dtype fp8", "--dtype must be one of bf16, fp16, fp32, fp64, got 'fp8'"),
        ("--hardware gtx1080", "'gtx1080' has no rate for bf16; it has fp32, fp64"),
        ("--window 8 --dilated 8:1", "leave out --window or --dilated"),
        ("--dilated 2048", "--dilated takes LENGTH:RATE pairs"),
        ("--schedule circle", "schedule must be one of auto, ring, "),
        ("--layout dealt", "layout must be one of auto, all, contiguous, zigzag, striped; got 'dealt'"),
        ("--reserve lots", "--reserve must be a size like 40GiB, 512MiB or 0, got 'lots'"),
        ("--reserve 200GiB", "leave nothing of the 147,900,000,000 of 'h200'"),
        ("--inside rope", "link 'rope' is unknown; there is nvlink5, nvlink4, nvlink3, pcie4, pcie3, ndr, hdr, "),
        ("--max-tokens --fit", "take one of them"),
        ("--max-tokens --tokens 5", "leave out --tokens"),
        ("--fit --ranks 5", "leave out --ranks and --nodes"),
        ("--max-tokens --reserve 137GiB --layers 1M", "not even 1,024 tokens fit 8 ranks of h200"),
        ("--hardware-file none.toml", "none.toml cannot be read: No such file"),
        ("--hardware-file /dev/null", "/dev/null cannot be read: it is a pipe or a device"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(refused, arguments, said):
    assert said in refused(*arguments.split())


def test_a_file_with_a_missing_field_says_which_file_entry_and_field(refused, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(BUILT_IN.read_text().replace("launch_seconds = 20e-6\n", ""))
    assert f"{path}: [hardware.gtx1080] lacks launch_seconds" in refused("--hardware-file", str(path))


def test_with_a_file_of_ones_own_the_machine_must_be_named(refused, tmp_path):
    (tmp_path / "my.toml").write_text("")
    said = refused("--hardware-file", str(tmp_path / "my.toml"))
    assert "say with --hardware which machine is meant, of" in said


@pytest.mark.parametrize("tokens", ["1M", "1e6", "1_000_000", "1,000,000", "1000K"])
def test_a_million_may_be_written_as_one_likes(tokens, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["longring", "plan", "--tokens", tokens, "--schedule", "gather", "--json"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert json.loads(capsys.readouterr().out)["arguments"]["tokens"] == 10**6


# ---------------------------------------------------------------------------------------------- the document


def writer():
    spec = importlib.util.spec_from_file_location("write_command_line", DOCS / "write_command_line.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHOWN = {found["command"]: found[0] for found in writer().SHOWN.finditer((DOCS / "plan.md").read_text())}


def test_the_document_shows_the_example_of_the_issue():
    assert f"longring plan {' '.join(ASKED)}" in SHOWN


@pytest.mark.parametrize("command", SHOWN)
def test_what_the_document_shows_is_what_the_command_prints(command):
    assert writer().renewed(SHOWN[command]) == SHOWN[command], "run python docs/write_command_line.py"


def test_the_documents_file_of_ones_own_is_read(tmp_path):
    text = (DOCS / "plan.md").read_text().partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "my.toml").write_text(text)
    found = told(*SMALL, "--hardware-file", str(tmp_path / "my.toml"), "--hardware", "mine", "--ranks", "8")
    assert found["choices"][0]["nodes"] == 2


# ------------------------------------------------------------------------------------------- where it is printed


def shell(command, **environment):
    return subprocess.run(
        ["sh", "-c", command.replace("longring", f"{sys.executable} -m longring")],
        capture_output=True,
        timeout=100,
        env={**os.environ, "NO_COLOR": "1", **environment},
    )


@pytest.mark.parametrize("environment", [{"LC_ALL": "POSIX"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=str)
@pytest.mark.parametrize("asked_", ["--hardware list", " ".join(SMALL)])
def test_where_the_locale_is_plain_so_is_the_page(asked_, environment):
    done = shell(f"longring plan {asked_}", **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"\n--------" in done.stdout


def test_a_name_that_the_terminal_has_no_letters_for_is_printed_as_far_as_it_goes(tmp_path):
    text = BUILT_IN.read_text().replace('title = "NVIDIA H200 SXM, 141 GB"', 'title = "Großrechner"')
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    done = shell(f"longring plan --hardware list --hardware-file {tmp_path}/mine.toml", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Gro?rechner" in done.stdout


@pytest.mark.parametrize("asked_", ["--hardware list", " ".join(SMALL), "--json", "--help"])
def test_a_closed_output_is_one_line_and_an_exit_code(asked_):
    done = shell(f"longring plan {asked_} >&-")
    assert done.returncode == 1
    assert done.stderr == b"error: standard output is closed; redirect it to a file, or to /dev/null\n"
