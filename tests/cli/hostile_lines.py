"""Hostile and careless command lines, each run in a process of its own with little memory and a time limit.

    python tests/cli/hostile_lines.py COUNT [SEED]

The first lines are attacks that once did harm; then come random ones. Printed is one JSON object: exit codes, and the
lines that ended in a traceback, an error of Python, control characters, by the limit, or with processes left.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MEMORY = 8 << 30  # bytes of addresses, of which torch takes a good part
SECONDS = 40.0
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ESCAPES = "\x1b]0;pwn\x07\x9b31m[bold]\u202e"

SMALL = {  # what a command would do is over in seconds
    "plan": "--tokens 4K --ranks 2 --heads 2 --head-dim 8",
    "doctor": "--ranks 2 --timeout 20",
    "verify": "--ranks 2 --only nothing --minutes 0.1",
    "bench": "--tokens 64 --ranks 2 --heads 2 --head-dim 8 --rounds 1 --only nothing",
    "bench compare": "record.json record.json",
    "profile": "--tokens 64 --ranks 2 --heads 2 --head-dim 8 --repeat 1",
    "replay": "--tokens 256 --ranks 2 --heads 2 --head-dim 8 --samples 1 --repeats 1",
    "train": "--steps 1 --context 64 --dim 16 --heads 1 --layers 1 --ranks 1 --data text.txt --out run",
    "eval": "run --ranks 1 --sequences 1",
    "conform": "nothing:nothing --ranks 2",
    "demo": "--tokens 64 --ranks 2 --heads 2 --head-dim 8 --out demo",
}
VALUES = (
    *("", " ", "0", "-1", "1.5", "nan", "inf", "-inf", "1e999", "1e-999", "9" * 5000, "9" * 20, "0x10", "1_0", "2Gi"),
    *(
        "\u0663",
        "\uff11",
        "\udcff\udcfe",
        "a\nb",
        ESCAPES,
        "a" * 300,
        "a" * 6000,
        "../../..",
        "~",
        "%s%n",
        "None",
        "true",
    ),
    *(",", "1,2", "1,,2", "1:1", "8:0", "-1:-1", "1:" * 500, "auto", "ring", "fp32", "cpu", "--json", "{}", "[" * 500),
)
ATTACKS = (
    *(f"train --config {name}" for name in ("pipe", "zero", "loop", "folder", "deep.toml", "digits.toml", "dots.toml")),
    *(f"train --config {name}" for name in ("binary", "sparse", "nul.toml", "odd.toml", "a" * 300, "a" * 6000)),
    *(
        f"plan --tokens 1K --ranks 2 --hardware-file {name}"
        for name in ("pipe", "zero", "deep.toml", "dots.toml", "loop")
    ),
    *(
        f"bench compare record.json {name}"
        for name in ("pipe", "zero", "deep.json", "digits.json", "binary", "loop", "null")
    ),
    *(f"bench compare {name} record.json" for name in ("escapes.json", "markup.json")),
    "plan --tokens 1K --ranks 2 --hardware h --hardware-file escapes.toml",
    "plan --hardware list --hardware-file escapes.toml",
    *(
        f"{{train}} --data {name}"
        for name in ("pipe", "zero", "loop", "a" * 300, "a" * 6000, "beside.bin", "vocabulary.npy")
    ),
    *(f"{{train}} --data {name}" for name in ("deep.bin", "header.npy", "zerobeside.npy", "escapes", "deeper")),
    *(f"{{train}} --out {name}" for name in ("pipe", "zero", "loop", "text.txt", "a" * 300, "a" * 6000)),
    *(f"{{train}} --weights {name}" for name in ("pipe", "loop", "folder", "a" * 300)),
    *(f"{{demo}} --report {name}" for name in ("pipe", "loop", "zero", "folder", "a" * 300, "a" * 6000)),
    *(f"{{bench}} --out {name} --report {name}" for name in ("pipe", "loop", "zero")),
    *(f"{{profile}} --trace {name}" for name in ("pipe", "loop")),
    *(f"eval {name}" for name in ("pipe", "loop", "folder", "text.txt", "a" * 300, "a" * 6000)),
    "verify --ranks 2 --json pipe",
    "eval run --out pipe",
    "train --ranks 1000000 --context 1M",
    "plan --tokens " + "9" * 5000 + " --ranks 2",
    "demo --seed " + "9" * 5000,
    "-h",
    "\x1b[31m",
)


def playground(folder: Path) -> None:
    """Files that a careless or hostile hand might name, in the working directory."""
    os.chdir(folder)
    import numpy as np

    os.mkfifo("pipe")
    Path("zero").symlink_to("/dev/zero")
    Path("loop").symlink_to("loop")
    Path("folder").mkdir()
    Path("binary").write_bytes(bytes(range(256)) * 40)
    with open("sparse", "wb") as file:
        file.truncate(1 << 40)
    Path("text.txt").write_text("some text to learn from. " * 400)
    Path("null").write_text("null")
    Path("deep.toml").write_text("a = " + "[" * 100_000)
    Path("digits.toml").write_text("steps = " + "9" * 5000)
    Path("dots.toml").write_text("a" + ".a" * 50_000 + " = 1")
    Path("nul.toml").write_text('data = "a\\u0000b"\nsteps = 1')
    Path("odd.toml").write_text('data = "\\u001b[31m"\nout = "\\u009b"\nsteps = nan')
    Path("deep.json").write_text("[" * 200_000)
    Path("digits.json").write_text("9" * 5000)
    record = json.loads((Path(__file__).parents[2] / "docs" / "records" / "bench.json").read_text())
    record["rows"] = record["rows"][:3]
    Path("record.json").write_text(json.dumps(record))
    for name, text in (("escapes", ESCAPES), ("markup", "[bold]x[/] [link=http://a]b[/link] [/nothing] :smile:")):
        changed = record | {"versions": {"torch": text}, "machine": {text: text}, "line": text, "commit": text}
        changed["rows"] = [
            {**row, "case": text, "name": text, "scenario": text, "note": text} for row in record["rows"]
        ]
        Path(f"{name}.json").write_text(json.dumps(changed))
    Path("escapes.toml").write_text(
        '[links."\\u001b[31m"]\nbytes_per_second = 1\nlatency_seconds = 0\nsource = "\\u009b"'
    )
    Path("escapes").mkdir()
    (Path("escapes") / ESCAPES.replace("/", "")).write_text("text " * 200)
    np.save("vocabulary.npy", np.array([1, 2, 2**31 - 3]))
    for name in ("beside.bin", "deep.bin"):
        Path(name).write_bytes(bytes(1000))
    os.mkfifo("beside.json")
    np.save("zerobeside.npy", np.arange(1000))
    Path("zerobeside.json").symlink_to("/dev/zero")
    header = b"-" * 9000 + b"1"
    Path("header.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    for _ in range(1200):
        os.makedirs("deeper", exist_ok=True)
        os.chdir("deeper")
    os.chdir(folder)


def lines(chance: random.Random, names: list[str]) -> Iterator[list[str]]:
    for attack in chance.sample(ATTACKS, len(ATTACKS)):
        words = attack.split(" ")
        if words[0].startswith("{"):
            words = [words[0][1:-1], *SMALL[words[0][1:-1]].split(), *words[1:]]
        yield words
    options = _options()
    while True:
        command = chance.choice(list(SMALL))
        words = SMALL[command].split() if chance.random() < 0.8 else []
        words = [word if chance.random() < 0.95 else chance.choice([*VALUES, *names]) for word in words]
        for _ in range(chance.choice((1, 1, 2, 3))):
            name, takes_a_value = chance.choice(options[command])
            words += [name] + ([chance.choice((*VALUES, *names))] if takes_a_value else [])
        if chance.random() < 0.1:
            words.insert(chance.randrange(len(words) + 1), chance.choice((*VALUES, *names)))
        yield [*command.split(), *words]


def _options() -> dict[str, list[tuple[str, bool]]]:
    from typer.main import get_command

    from longring.cli import app

    whole = get_command(app)
    found = {}
    for name in SMALL:
        first, _, second = name.partition(" ")
        command = whole.commands[first]
        command = command.commands[second] if second else command
        given = [(option, not one.is_flag) for one in command.params for option in one.opts if option.startswith("--")]
        found[name] = [pair for pair in given if pair[0] not in ("--self-test", "--show", "--faults")]
    return found


def run(words: list[str], seconds: float) -> tuple[int | None, str, int]:
    """(exit code, or None by the time limit; what it said; how many processes it left). A fork: torch is loaded."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            _become(words, said.fileno())
        until, code = time.monotonic() + seconds, None
        while code is None and time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0.005)
        until = time.monotonic() + 5
        while code is not None and _of_session(child) and time.monotonic() < until:
            time.sleep(0.05)
        left = _of_session(child)
        for process in left:
            os.kill(process, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
            left = []
        said.seek(0)
        return code, said.read().decode("utf-8", "backslashreplace"), len(left)


def _become(words: list[str], said: int) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["longring", *words]
    if words[:1] in (["train"], ["eval"]) and "2" not in words:  # as under torchrun, which spares a start of a process
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    from longring.cli import main

    code = 70
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 71
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        import threading

        if any(not each.daemon for each in threading.enumerate()[1:]):
            os.write(2, b"Traceback: threads are left\n")
        os._exit(code)


def _of_session(session: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = (Path("/proc") / entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry))
    return found


def main(count: int, seed: int, seconds: float = float("inf")) -> dict[str, object]:
    import torch

    import longring.bench.records
    import longring.train.run  # noqa: F401

    torch.set_num_threads(1)
    codes: Counter[str] = Counter()
    bad: dict[str, list[str]] = {kind: [] for kind in ("traceback", "raw", "controls", "killed", "left", "code")}
    began, done, slowest = time.monotonic(), 0, (0.0, "")
    folder = tempfile.mkdtemp(prefix="hostile-")
    try:
        playground(Path(folder))
        names = sorted(os.listdir("."))
        for words in lines(random.Random(seed), names):
            if done == count or time.monotonic() - began > seconds:
                break
            start = time.monotonic()
            code, said, left = run(words, min(SECONDS, began + seconds - time.monotonic()))
            done += 1
            slowest = max(slowest, (round(time.monotonic() - start, 1), shlex.join(words)[:300]))
            codes[str(code)] += 1
            line = shlex.join(words)[:300]
            told = f"{line} -> {code}: {said[-300:]}".encode("ascii", "backslashreplace").decode()
            wrong = {
                "traceback": "Traceback" in said,
                "raw": "the whole story" in said,
                "controls": CONTROLS.search(said) is not None,
                "killed": code is None,
                "left": left > 0,
                "code": code not in (0, 1, 2, None),
            }
            for kind, is_so in wrong.items():
                if is_so:
                    bad[kind].append(told)
    finally:
        os.chdir("/")
        subprocess.run(["rm", "-rf", folder], check=True)  # shutil.rmtree is recursive, and some of it is deep
    return {"lines": done, "seconds": round(time.monotonic() - began, 1), "slowest": slowest, "codes": codes, **bad}


if __name__ == "__main__":
    found = main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, float((sys.argv[3:] or ["inf"])[0]))
    print(json.dumps(found, indent=1))  # noqa: T201
