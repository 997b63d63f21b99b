"""Settings of `cluster:`, and a package that imports ray only where it is needed."""

import importlib.util
import signal
from pathlib import Path

import pytest

import lit_async_rl as rl
from lit_async_rl.api.ranks import placed_flags
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.errors import EngineError, RankError, SetupError
from lit_async_rl.ray import supervise
from lit_async_rl.ray.launcher import Screen, Start, ranked
from lit_async_rl.ray.rank import Place, _status
from lit_async_rl.ray.security import AUTH_MODE, is_loopback
from lit_async_rl.ray.supervise import Ended, Spot

QUICKSTART = ["--config", "configs/quickstart.yaml"]


@pytest.fixture
def at_the_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(trainer_ranks=0), "cluster.trainer_ranks must be >= 1, got 0"),
        (dict(max_failures=-2), "cluster.max_failures must be >= -1, got -2"),
        (dict(start_timeout_s=0.0), "cluster.start_timeout_s must be positive, got 0"),
        (dict(trainer_resources={"CPU": -1.0}), "cluster.trainer_resources.CPU must be a number >= 0, got -1"),
        (dict(trainer_resources={"gpus": 1.0}), "cluster.trainer_resources.gpus: Ray calls it GPU"),
        (dict(address="ray://head:10001"), "cluster.address must be auto or HOST:PORT, got 'ray://head:10001'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        rl.RayCluster(**settings)


def test_replicas_lie_between_their_limits():
    with pytest.raises(
        ValueError, match=r"cluster.engines.replicas must be between min and max, got replicas=1, min=2"
    ):
        rl.EngineReplicas(replicas=1, min=2, max=4)


def test_one_rank_without_needs_is_not_placed():
    assert not rl.RayCluster(engines=rl.EngineReplicas(replicas=2)).places_ranks
    assert rl.RayCluster(trainer_ranks=2).places_ranks
    assert rl.RayCluster(trainer_resources={"GPU": 1.0}).places_ranks
    assert rl.RayCluster().needs_of_rank(has_gpus=True).by_name == {"CPU": 0.5, "GPU": 1.0}


def test_without_ray_it_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(SetupError, match=r"pip install 'lit-async-rl\[ray\]'"):
        rl.RayCluster(trainer_ranks=2).check()
    rl.RayCluster().check()


@pytest.mark.slow
def test_only_a_cluster_imports_ray(process, tmp_path):
    code = "import sys; import lit_async_rl as rl; from lit_async_rl.cli.app import main; rl.RayCluster(); main(); "
    code += "print('ray' in sys.modules)"
    short = ["--trainer.max_steps", "1", "--data.groups_per_step", "2", "--data.validation.prompts", "null"]
    short += ["--trainer.logger.save_dir", str(tmp_path), "--config", str(Path("configs/quickstart.yaml").absolute())]
    done = process.run([*short, "--model.model", rl.asset("small_sort_policy")], tmp_path, code=code)
    assert done.status == 0, done.said
    assert done.said.splitlines()[-1] == "False"


@pytest.mark.slow
def test_a_configuration_with_replicas_trains_with_them_here(at_the_root, tmp_path):
    cluster = ["--cluster", "RayCluster", "--cluster.engines.replicas", "2", "--cluster.engines.max", "3"]
    cli = AsyncRLCLI([*QUICKSTART, *cluster, "--trainer.logger.save_dir", str(tmp_path)], starts_ranks=True)
    assert not cli.places_ranks
    engine = cli.datamodule.engine
    assert isinstance(engine, rl.RayEngine)
    assert (engine.replicas, engine.num_cpus) == (2, 0.5)
    assert any(isinstance(callback, rl.ReplicaScaling) for callback in cli.trainer.callbacks)


def test_an_environment_stays_around_the_replicas(at_the_root, tmp_path):
    cluster = ["--cluster", "RayCluster", "--cluster.engines.replicas", "2"]
    words = ["--config", "configs/calculator.yaml", *cluster, "--trainer.logger.save_dir", str(tmp_path)]
    engine = AsyncRLCLI(words).datamodule.engine
    assert isinstance(engine, rl.EpisodeEngine)
    assert isinstance(engine.engine, rl.RayEngine)
    assert isinstance(engine.fresh().engine, rl.RayEngine), "also after a restart"


def test_nothing_is_made_where_ranks_are_only_started(at_the_root):
    flags = ["--cluster.class_path", "RayCluster", "--cluster.init_args.trainer_ranks", "2"]
    cli = AsyncRLCLI([*QUICKSTART, *flags], starts_ranks=True)
    assert cli.places_ranks
    assert not hasattr(cli, "trainer")


def test_a_rank_is_told_where_it_is():
    place = Place(num_local=2, num_nodes=3, resume_from="a/last.ckpt", tell_folder=print, give=print)
    flags = ["--trainer.devices", "2", "--trainer.num_nodes", "3", "--ckpt_path", "a/last.ckpt"]
    assert placed_flags(place) == flags


def test_the_settings_of_a_run_from_python_are_a_configuration():
    cluster = rl.RayCluster(trainer_ranks=2, engines=rl.EngineReplicas(replicas=2, resources={"GPU": 1.0}))
    given = cluster.as_config()["init_args"]
    made = rl.RayCluster(**given | {"engines": rl.EngineReplicas(**given["engines"])})
    assert made.as_config() == cluster.as_config()


# -- what is said, and how an end is judged ---------------------------------------------------------------------------


def test_each_line_is_shown_once(capfd):
    screen = Screen()
    screen.show([(1, "stdout", "seed 0\nonly "), (0, "stdout", "seed 0\nstep 1")])
    screen.show([(1, "stdout", "here\n"), (0, "stdout", "/5\n"), (1, "stderr", "cut off")], is_last=True)
    shown = capfd.readouterr()
    assert shown.out == "seed 0\nstep 1/5\nrank 1: only here\n"
    assert shown.err == "rank 1: cut off\n"
    screen.show([(1, "stderr", "from the next start\n")], is_last=True)
    assert capfd.readouterr().err == "rank 1: from the next start\n"


def test_what_nobody_reads_is_not_kept_for_ever():
    output = supervise.Output()
    for _ in range(30):
        output.add("stdout", "x" * 100_000)
    assert 900_000 < sum(len(text) for _, text in output.take()) <= 1 << 20
    assert not output.has_some


def ended(rank, status, last_lines=""):
    return Ended(rank=rank, status=status, where="node 10.0.0.3, pid 7", last_lines=last_lines)


def test_an_end_names_node_process_and_last_lines():
    assert supervise.describe_end(ended(1, -signal.SIGKILL, "out of memory")) == (
        "rank 1 (node 10.0.0.3, pid 7) was killed by SIGKILL; its last lines:\nout of memory"
    )
    assert "was lost, with its machine" in supervise.describe_end(ended(1, None))


def test_mistakes_come_again_and_lost_ranks_do_not():
    assert _status(ValueError("data.max_staleness")) == supervise.FINAL_STATUS
    for error in (RankError("x"), EngineError("x"), ConnectionError("x"), RuntimeError("Connection closed by peer")):
        assert _status(error) == 1


ALONE = """
import signal
from lit_async_rl.ray import rank
rank.connect = lambda **settings: signal.pause()  # what it does until it ends
rank.main()
"""


@pytest.mark.slow
def test_a_rank_ends_when_the_other_end_of_its_stdin_is_gone(process, tmp_path):
    variables = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", supervise.RESUME: ""}
    done = process.run([], tmp_path, environment=variables, code=ALONE)
    assert (done.status, done.said) == (1, "")


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ((0, 0), None),
        ((0, 1), 1),  # from another rank's end, which was not told
        ((1, -signal.SIGKILL), 1),
        ((-signal.SIGABRT, None), 1),
        ((1, supervise.FINAL_STATUS), None),
    ],
)
def test_all_ranks_start_again_after_a_loss_and_not_after_a_mistake(statuses, cause):
    start = Start(None, [], [], screen=Screen())
    start.ended = {rank: ended(rank, status) for rank, status in enumerate(statuses)}
    assert (start.cause and start.cause.rank) == cause
    start._num_passed = 1
    assert start.cause is None, "a run that was asked to end"


# -- where ranks are --------------------------------------------------------------------------------------------------


def spot(node, *gpus, port=0, problem=""):
    return Spot(node=node, ip=f"10.0.0.{node}", gpus=gpus, port=port, checkpoint=None, problem=problem)


def test_ranks_are_numbered_node_by_node_and_see_all_gpus_of_their_node():
    ranks = ranked([spot("2", "10", port=5), spot("1", "0"), spot("2", "9"), spot("1", "1")])
    assert [rank.actor for rank in ranks] == [2, 0, 1, 3]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "CUDA_VISIBLE_DEVICES")
    places = [[rank.variables[name] for name in names] for rank in ranks]
    assert places == [["0", "0", "0", "9,10"], ["1", "1", "0", "9,10"], ["2", "0", "1", "0,1"], ["3", "1", "1", "0,1"]]
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "5"}
    assert all(rank.variables.items() >= shared.items() for rank in ranks)
    assert "CUDA_VISIBLE_DEVICES" not in ranked([spot("1")])[0].variables


def test_nodes_with_unequal_numbers_of_ranks_are_refused():
    with pytest.raises(
        SetupError,
        match=r"trainer_ranks=4: Ray has placed the ranks as 2 on the node 10.0.0.1, 1 on .* every node must have",
    ):
        ranked([spot("1"), spot("1"), spot("2"), spot("3")])
    with pytest.raises(SetupError, match="asks for no token"):
        ranked([spot("1"), spot("2", problem="the node asks for no token")])


# -- who may reach it -------------------------------------------------------------------------------------------------


def test_addresses_of_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.1:6379", "localhost:6379", "localhost", "::1", "[::1]:6379")))
    assert not any(map(is_loopback, ("10.0.0.3", "10.0.0.3:6379", "0.0.0.0", "head:6379", "fe80::1")))


def test_a_rank_runs_on_no_node_that_others_reach_without_a_token(monkeypatch):
    monkeypatch.setenv(AUTH_MODE, "disabled")
    assert "requires no token" in supervise.misplaced("10.0.0.3", "/")
    assert supervise.misplaced("127.0.0.1", "/") == ""
    monkeypatch.setenv(AUTH_MODE, "token")
    assert supervise.misplaced("10.0.0.3", "/") == ""
    assert "all nodes must share it" in supervise.misplaced("10.0.0.3", "/nowhere/at/all")
