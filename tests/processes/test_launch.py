"""`longring.launch`: results in order of rank, the first error in the caller, and no process left behind."""

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import longring as lr
from longring import launching
from longring.errors import ArgumentError, PeerLost, RankFailed
from longring.interrupts import held_back

pytestmark = pytest.mark.processes

SOON = 60.0  # seconds: a bound on what should take one, and takes twenty where eight programs share two cores


def total(x, *others):
    """This rank's number, and the sum over all ranks."""
    mine = x * (dist.get_rank() + 1)
    summed = mine.clone()
    dist.all_reduce(summed)
    return mine, summed


def surroundings():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "LONGRING_TEST_NOTE")
    return {name: os.environ.get(name) for name in names}, torch.get_num_threads(), dist.get_backend()


def fail_on(rank, how):
    """One rank fails, the others wait for it."""
    if dist.get_rank() == rank:
        how()
    dist.barrier()


def raise_value_error():
    raise ValueError("no such token: 7")


def lose_peer():
    raise PeerLost("rank 1 waited for rank 0")


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_myself():
    os.kill(os.getpid(), signal.SIGSTOP)


def exit_early():
    os._exit(3)


def fail_after_another():
    """Rank 0 reports that it lost a peer, before rank 1 reports why."""
    if dist.get_rank() == 0:
        lose_peer()
    time.sleep(0.3)
    raise_value_error()


def give_what_cannot_be_pickled():
    return lambda: None


def spoil_its_end():
    """Give a result, then die by a signal on the way out."""
    import threading

    def die_later():
        time.sleep(0.5)
        kill_myself()

    threading.Thread(target=die_later).start()  # not a daemon: the process waits for it
    return 1


def tell_pid_and_wait(path):
    with open(f"{path}/{dist.get_rank()}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def launch_inside():
    return lr.launch(surroundings, ranks=7)


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    assert multiprocessing.active_children() == []


def test_results_come_in_order_of_rank():
    results = lr.launch(total, torch.ones(3), ranks=3)
    assert [mine.tolist() for mine, _ in results] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert all(summed.tolist() == [6.0] * 3 for _, summed in results)


def test_a_rank_finds_what_torchrun_would_tell_it(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LONGRING_TEST_NOTE", "set after the fork server began")
    threads = max(1, launching._cores() // 2)
    for rank, (environment, torch_threads, backend) in enumerate(lr.launch(surroundings, ranks=2)):
        assert environment == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": str(threads),
            "LONGRING_TEST_NOTE": "set after the fork server began",
        }
        assert torch_threads == threads
        assert "gloo" in backend


def test_threads_that_the_user_asked_for_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    [(environment, threads, _)] = lr.launch(surroundings, ranks=1)
    assert (environment["OMP_NUM_THREADS"], threads) == ("3", 3)


def test_an_error_is_raised_in_the_caller():
    with pytest.raises(RankFailed, match="rank 1 of 2 raised ValueError: no such token: 7") as caught:
        lr.launch(fail_on, 1, raise_value_error, ranks=2)
    error = caught.value
    assert (error.rank, error.error_type, error.error_text) == (1, "ValueError", "no such token: 7")
    assert error.signal is None
    assert "\n" not in str(error)
    assert "in raise_value_error" in error.traceback_text
    assert error.traceback_text in error.__notes__[0]
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.error_type) == (str(error), 1, "ValueError")


def test_the_cause_is_told_not_its_consequence():
    with pytest.raises(RankFailed, match="rank 1 of 2 raised ValueError"):
        lr.launch(fail_after_another, ranks=2)
    with pytest.raises(RankFailed, match="rank 0 of 2 raised PeerLost: rank 1 waited"):
        lr.launch(fail_on, 0, lose_peer, ranks=2)
    with pytest.raises(RankFailed, match="rank 1 of 2 raised ValueError"):
        lr.launch(fail_on, 1, raise_value_error, ranks=2)


def test_a_killed_rank_is_named_with_its_signal():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 of 3 was killed by SIGKILL before it gave a result") as caught:
        lr.launch(fail_on, 0, kill_myself, ranks=3)
    assert (caught.value.rank, caught.value.signal) == (0, "SIGKILL")
    assert time.monotonic() - start < SOON


def test_a_rank_that_leaves_without_a_word_is_named():
    with pytest.raises(RankFailed, match="rank 1 of 2 ended with exit code 3 before it gave a result"):
        lr.launch(fail_on, 1, exit_early, ranks=2)


def test_a_death_after_the_result_is_no_success():
    with pytest.raises(RankFailed, match="rank 0 of 1 was killed by SIGKILL after it had given its result"):
        lr.launch(spoil_its_end, ranks=1)


def test_the_others_are_ended_when_they_do_not_notice(monkeypatch):
    monkeypatch.setattr(launching, "GRACE", 0.5)
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2 raised ValueError"):
        lr.launch(sleep_or_raise, ranks=2)
    assert time.monotonic() - start < SOON


def sleep_or_raise():
    if dist.get_rank() == 1:
        raise_value_error()
    time.sleep(600)


def test_a_stopped_rank_meets_the_timeout():
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"ranks 0, 1 of 2 had not ended after 2 s"):
        lr.launch(fail_on, 1, stop_myself, ranks=2, timeout=2)
    assert 2 <= time.monotonic() - start < SOON


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RankFailed, match="rank 0 of 1 raised") as caught:
        lr.launch(give_what_cannot_be_pickled, ranks=1)
    assert "pickle" in str(caught.value)


@pytest.mark.parametrize(
    ("program", "args", "options", "message"),
    [
        (lambda: None, (), {}, "top level of a module or script"),
        (total, (lambda: None,), {}, "arguments of total cannot be sent"),
        ("total", (), {}, "program must be a function"),
        (total, (), {"ranks": 0}, "ranks must be"),
        (total, (), {"ranks": True}, "ranks must be"),
        (total, (), {"timeout": 0}, "timeout must be"),
        (total, (), {"timeout": float("nan")}, "timeout must be"),
        (total, (), {"timeout": "3"}, "timeout must be"),
        (total, (), {"backend": None}, "backend must be"),
        (total, (), {"backend": "nccl", "ranks": 999}, "needs a GPU for each of this machine.s 999 ranks"),
    ],
)
def test_what_cannot_be_started_is_refused(program, args, options, message):
    with pytest.raises(ArgumentError, match=message):
        lr.launch(program, *args, **options)


def test_a_prompt_is_told_to_use_a_file():
    code = "import longring as lr\ndef f(): pass\nlr.launch(f, ranks=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "define them in a module or in a script file, not in a notebook, at a prompt" in done.stderr


def test_a_rank_that_launches_joins_its_own_world():
    for rank, [(environment, _, _)] in enumerate(lr.launch(launch_inside, ranks=2)):
        assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(rank), "2")


JOINING = """
import os, sys, torch, torch.distributed as dist, longring as lr
def program(x):
    summed = x.clone()
    dist.all_reduce(summed)
    return os.getpid(), summed.item()
for _ in range(4):
    [(pid, found)] = lr.launch(program, torch.tensor(float(os.environ["RANK"]) + 1), ranks=9)
    assert pid == os.getpid() and not dist.is_initialized()
    lr.launch(len, "over at once")
sys.stdout.write(f"sum {found}\\n")  # at once: others write into the same pipe
"""


def test_in_a_world_of_others_this_process_is_the_rank_as_often_as_it_likes():
    """Rank 0 is the host of the store, as where Slurm started the ranks."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOINING],
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    assert [(rank.communicate(timeout=60)[0], rank.returncode) for rank in ranks] == [("sum 6.0\n", 0)] * 3


def test_so_it_is_under_torchrun(tmp_path):
    script = tmp_path / "joining.py"
    script.write_text(JOINING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    done = subprocess.run(torchrun, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["sum 6.0"] * 3


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


CALLER = """
import signal, sys
sys.path.insert(0, {here!r})
import longring as lr
import test_launch
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it runs in the background
    lr.launch(test_launch.tell_pid_and_wait, {path!r}, ranks=2)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_the_caller(tmp_path, ending):
    script = tmp_path / "caller.py"
    script.write_text(CALLER.format(here=os.path.dirname(__file__), path=str(tmp_path)))
    caller = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    pids = [int(read_when_there(tmp_path / str(rank))) for rank in range(2)]
    assert all(map(is_alive, pids))
    caller.send_signal(ending)
    _, said = caller.communicate(timeout=SOON)
    wait_until(lambda: not any(map(is_alive, pids)))
    if ending == signal.SIGINT:
        assert re.search(r"^KeyboardInterrupt", said, re.MULTILINE)


def read_when_there(path):
    wait_until(lambda: path.exists() and path.read_text())
    return path.read_text()


def wait_until(there):
    deadline = time.monotonic() + SOON
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_waits_until_a_rank_is_started_whole():
    """Heard in the middle of it, the rank would read half of its work."""
    done = []

    def interrupted():
        with held_back():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["the rest"]


PRESSED = """
import signal
if __name__ == "__mp_main__":  # a rank that loads the script, before its program
    signal.raise_signal(signal.SIGINT)
import longring as lr
def number():
    return 7
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(lr.launch(number, ranks=2, timeout=60))
"""


def test_a_rank_is_deaf_to_ctrl_c_while_it_loads_what_the_script_loads(tmp_path):
    script = tmp_path / "pressed.py"
    script.write_text(PRESSED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[7, 7]\n", "")


def heard_ctrl_c():
    """How a rank hears Ctrl-C: in its program as any process does."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_rank_hears_ctrl_c_in_its_program_as_any_process_does():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background are deaf to it
    try:
        assert lr.launch(heard_ctrl_c, ranks=2, timeout=SOON) == [True, True]
    finally:
        signal.signal(signal.SIGINT, before)


def test_nobody_begins_before_all_have_joined():
    """Whose program is over at once would be gone while others still connect to it."""
    for late in range(3):
        store, begun = dist.HashStore(), []

        def join(rank, store=store, begun=begun):
            launching._wait_for_all(store, rank, 3)
            begun.append(rank)

        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(3)]
        for rank in {0, 1, 2} - {late}:
            threads[rank].start()
        threads[late - 1].join(0.2)
        assert begun == []
        threads[late].start()
        for thread in threads:
            thread.join(SOON)
        assert sorted(begun) == [0, 1, 2]


def test_the_host_of_the_store_leaves_last():
    store, begun = dist.HashStore(), threading.Event()

    def host():
        launching._wait_for_all(store, 0, 2)
        begun.set()

    thread = threading.Thread(target=host, daemon=True)
    thread.start()
    store.set("longring/joined/1", "yes")
    store.wait(["longring/all joined"])
    assert not begun.wait(0.2)
    store.set("longring/left/1", "yes")
    assert begun.wait(SOON)
    thread.join(SOON)


@pytest.mark.parametrize("program", [heard_ctrl_c, signal.raise_signal], ids=["returns", "is interrupted"])
def test_before_and_behind_its_program_a_rank_is_deaf_to_ctrl_c(program, monkeypatch):
    """Where multiprocessing would print half a traceback beside the one line of a command."""
    monkeypatch.setattr(launching, "_join", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    arguments = (signal.SIGINT,) if program is signal.raise_signal else ()
    before = signal.getsignal(signal.SIGINT)
    try:
        assert pickle.loads(pickle.dumps(launching._Deaf("longring rank 0"))) == "longring rank 0"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        said = launching._outcome(pickle.dumps((program, arguments)), 0, "gloo", True)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    if arguments:
        assert said.error_type == "KeyboardInterrupt"
    else:
        assert pickle.loads(said.pickled) is True
