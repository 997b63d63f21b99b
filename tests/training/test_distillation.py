"""On-policy distillation: gradients against enumeration and slow loops, runs that learn, and refusals by name."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import lightning.pytorch as pl
import pytest
import torch
from flow import MODEL, barrier_engine, fit, make_data, make_module, parameters
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import lit_async_rl as rl
from lit_async_rl.callbacks import SaveOnFailure
from lit_async_rl.cli.app import main
from lit_async_rl.errors import EngineError
from lit_async_rl.losses.distillation import divergence, with_tail
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.training.distillation import Distiller, check_same_tokens
from lit_async_rl.training.objective import Objective
from lit_async_rl.types import RolloutBatch

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
KINDS = ["reverse_kl", "forward_kl", "jsd"]


def slow(kind, p, q, beta):
    """By the textbook, of two lists of probabilities."""

    def kl(a, b):
        return sum((x * (x / y).log() for x, y in zip(a, b, strict=True) if x > 0), torch.zeros((), dtype=torch.double))

    if kind == "reverse_kl":
        return kl(p, q)
    if kind == "forward_kl":
        return kl(q, p)
    mixture = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def distributions(rows, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, rows, size, dtype=torch.double, generator=generator)
    return logits[0].requires_grad_(), logits[1].log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_value_and_gradient_are_those_of_the_definition(kind, beta):
    logits, teacher = distributions(5, 7)
    found = divergence(kind, logits.log_softmax(-1), teacher, beta=beta)
    (own,) = torch.autograd.grad(found.sum(), logits)
    other = logits.detach().clone().requires_grad_()
    values = [slow(kind, list(row), list(q), beta) for row, q in zip(other.softmax(-1), teacher.exp(), strict=True)]
    assert found.tolist() == pytest.approx([float(value) for value in values], abs=1e-12)
    (expected,) = torch.autograd.grad(sum(values), other)
    assert (own - expected).abs().max() < 1e-9


def test_limits_of_the_mixture_and_the_end_of_equal_distributions():
    logits, teacher = distributions(4, 6)
    student = logits.log_softmax(-1)
    small = 1e-6
    forward = divergence("jsd", student, teacher, beta=small) / small
    assert forward.tolist() == pytest.approx(divergence("forward_kl", student, teacher).tolist(), rel=1e-4)
    for kind in KINDS:
        assert divergence(kind, teacher, teacher).abs().max() < 1e-12
    never = torch.tensor([[0.0, -torch.inf]], dtype=torch.double)
    for kind in KINDS:
        assert divergence(kind, never, never).tolist() == [0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tail_is_exact_for_one_token_and_a_lower_bound_for_several(kind):
    logits, teacher = distributions(20, 9)
    student = logits.log_softmax(-1)
    whole = divergence(kind, student, teacher)
    for num in (8, 3):
        ids = teacher.topk(num).indices
        merged = divergence(kind, with_tail(student.gather(-1, ids)), with_tail(teacher.gather(-1, ids)))
        if num == 8:
            assert merged.tolist() == pytest.approx(whole.tolist(), abs=1e-12)
            own, expected = (torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (merged, whole))
            assert (own - expected).abs().max() < 1e-9
        assert (merged <= whole + 1e-12).all()


# -- the objective ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    """Student and teacher of a family that computes all in float64 (a Llama's norms are float32)."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=32, vocab_size=17, initializer_range=0.4)
    return tuple(GPT2LMHeadModel(config).double().eval() for _ in range(2))


def batch_of(student, rows=6, width=9, temperature=0.8):
    """Rows of two groups, whose first tokens are one prompt each; some tokens do not train."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 13, (rows, width), generator=generator)
    ids[: rows // 2, :3] = ids[0, :3].clone()
    ids[rows // 2 :, :3] = ids[-1, :3].clone()
    lengths = torch.randint(5, width + 1, (rows, 1), generator=generator)
    places = torch.arange(width)
    mask = (places >= 3) & (places < lengths) & (torch.rand(rows, width, generator=generator) < 0.9)
    weights = torch.rand(rows, width, generator=generator, dtype=torch.double) * mask
    with torch.no_grad():
        logprobs = CausalPolicy(student)(ids, mask, temperature).logprobs
    noise = 0.3 * torch.randn(rows, width, generator=generator, dtype=torch.double)
    return RolloutBatch(
        input_ids=ids,
        attention_mask=places < lengths,
        loss_mask=mask,
        behavior_logprobs=(logprobs + noise) * mask,
        versions=torch.zeros(rows, width, dtype=torch.long),
        advantages=torch.randn(rows, width, generator=generator, dtype=torch.double) * mask,
        token_weights=weights,
        rewards=torch.zeros(rows),
        group_index=torch.tensor([0] * (rows // 2) + [1] * (rows - rows // 2)),
        temperature=temperature,
    )


class Given(rl.Teacher):
    """A teacher that is there."""

    def __init__(self, lm, packing=None):
        self.lm = lm
        self.packing = packing

    def open(self, student, device, mesh=None):
        from lit_async_rl.training.distillation import _OpenLocalTeacher, vocabulary_of

        policy = CausalPolicy(self.lm, student.chunk_tokens, self.packing).requires_grad_(False)
        return _OpenLocalTeacher(policy, vocabulary_of(student))


def gradient(models, batch, chunk_tokens=4096, packing=None, coefficient=1.0, **settings):
    student, teacher = models
    policy = CausalPolicy(student, chunk_tokens, packing)
    given = teacher if isinstance(teacher, rl.Teacher) else Given(teacher, packing)
    distillation = rl.Distillation(teacher=given, coefficient=coefficient, **settings)
    distiller = Distiller(distillation)
    distiller.open(policy, torch.device("cpu"))
    objective = Objective(rl.Reinforce(), rl.BehaviorProximal(), None, None, 0.0, 0.0, distiller=distiller)
    loss, signals = objective(policy, None, batch, 0)
    return loss, torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(student.parameters()))]), signals


def slow_loss(models, batch, kind, beta):
    """Token by token, with plain forward passes."""
    student, teacher = models
    loss = 0.0
    for row in range(len(batch)):
        for place in batch.loss_mask[row].nonzero()[:, 0].tolist():
            prefix = batch.input_ids[row : row + 1, :place]
            p = (student(prefix).logits[0, -1] / batch.temperature).softmax(-1)
            with torch.no_grad():
                q = (teacher(prefix).logits[0, -1] / batch.temperature).softmax(-1)
            loss = loss + batch.token_weights[row, place] * slow(kind, list(p), list(q), beta)
    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_the_analytic_gradient_is_that_of_a_loop_over_tokens(models, kind):
    batch = batch_of(models[0])
    expected = slow_loss(models, batch, kind, 0.3)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(expected, list(models[0].parameters()))])
    settings = [{}, {"chunk_tokens": 5}, {"packing": rl.PrefixTreePacking()}, {"top_k": _vocabulary(models) - 1}]
    for more in settings:
        loss, own, signals = gradient(models, batch, divergence=kind, beta=0.3, **more)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-9), more
        assert (own - wanted).norm() < 1e-9 * wanted.norm(), more
        assert signals["divergence"].shape == batch.loss_mask.shape
        assert bool((signals["divergence"][~batch.loss_mask] == 0).all())
    _, twice, _ = gradient(models, batch, divergence=kind, beta=0.3, coefficient=2.0)
    assert (twice - 2 * wanted).norm() < 1e-9 * wanted.norm()


def _vocabulary(models):
    return models[0].config.vocab_size


@pytest.mark.parametrize("settings", [{}, {"chunk_tokens": 4}, {"top_k": 3}, {"gradient": "sampled"}], ids=str)
def test_each_source_has_its_teacher(models, settings):
    """The gradient is the sum of those of the rows of each source, with its teacher."""
    student, teacher = models
    torch.manual_seed(5)
    other = GPT2LMHeadModel(teacher.config).double().eval()
    source = torch.tensor([0, 1, 0, 0, 1, 1])
    batch = batch_of(student)
    teachers = rl.SourceTeachers(key="kind", teachers={"a": Given(teacher), "b": Given(other)})
    loss, own, signals = gradient((student, teachers), batch.replace(source=source), **settings)
    expected = []
    for number, one in enumerate((teacher, other)):
        rows = (source == number).nonzero()[:, 0]
        expected.append(gradient((student, one), batch.select(rows, batch.input_ids.shape[1]), **settings))
        assert torch.equal(signals["divergence"][rows] != 0, batch.loss_mask[rows])
    assert float(loss.detach()) == pytest.approx(sum(float(one[0].detach()) for one in expected), rel=1e-6)
    wanted = expected[0][1] + expected[1][1]
    assert (own - wanted).norm() < 1e-6 * wanted.norm()
    empty = batch.replace(source=source, loss_mask=torch.zeros_like(batch.loss_mask))
    assert float(gradient((student, teachers), empty, **settings)[0]) == 0


@pytest.mark.slow
def test_a_run_with_a_teacher_for_each_source():
    def prompts(names):
        return [{"prompt": f"{number}=", "kind": names[number % len(names)]} for number in range(32)]

    teachers = rl.SourceTeachers(key="kind", teachers={"a": MODEL, "b": rl.LocalTeacher(model=MODEL)})
    for names in (["a", "b"], ["a", "c"]):
        module = make_module(random_init=True, distillation=rl.Distillation(teacher=teachers))
        data = make_data(prompts=rl.InMemoryPrompts(prompts(names)), reward=rl.no_reward)
        if "c" in names:
            with pytest.raises(ValueError, match="has teachers for kind=a, b, but none for a prompt with kind=c"):
                fit(module, data, 2)
        else:
            fit(module, data, 2)


@pytest.mark.parametrize("sizes", [(17, 21), (21, 17)], ids=["larger teacher", "larger student"])
def test_vocabularies_may_have_different_padding_behind_the_same_tokens(models, sizes):
    """The divergence is over the ids that both have, in nats of what is left when the others are taken out."""
    torch.manual_seed(2)
    config = models[0].config.to_dict()
    student, teacher = (
        GPT2LMHeadModel(GPT2Config(**(config | {"vocab_size": size}))).double().eval() for size in sizes
    )
    for lm in (student, teacher):
        with torch.no_grad():
            lm.lm_head.weight[17:] *= 5  # likely ones
    batch = batch_of(student)
    _, own, signals = gradient((student, teacher), batch)
    total = 0.0
    for row, place in batch.loss_mask.nonzero().tolist():
        both = (lm(batch.input_ids[row : row + 1, :place]).logits[0, -1, :17] / 0.8 for lm in (student, teacher))
        p, q = (logits.log_softmax(-1) for logits in both)
        total = total + batch.token_weights[row, place] * (p.exp() * (p - q.detach())).sum()
        assert float(signals["divergence"][row, place]) == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-9)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(student.parameters()))])
    assert (own - wanted).norm() < 1e-9 * wanted.norm()
    ids, _ = Given(teacher).open(CausalPolicy(student), torch.device("cpu")).likeliest(batch, 9)
    assert int(ids.max()) < 17
    strange = batch.replace(input_ids=torch.where(batch.loss_mask, 20, batch.input_ids))
    for settings in ({}, {"top_k": 3}, {"gradient": "sampled"}):
        if sizes[1] == 17:
            with pytest.raises(
                EngineError,
                match=r"has only 17 token ids, but the student has sampled token id 20, which is padding",
            ):
                gradient((student, teacher), strange, **settings)


def test_the_sampled_gradient_is_unbiased_with_importance_weights_and_biased_without(models):
    """Over all next tokens of a stale state, weighted by the policy that sampled them."""
    student, teacher = models
    prefix = torch.tensor([3, 5, 4])
    size = _vocabulary(models)
    ids = torch.cat([prefix.expand(size, -1), torch.arange(size)[:, None]], 1)
    mask = torch.zeros(size, 4, dtype=torch.bool)
    mask[:, 3] = True
    with torch.no_grad():
        log_p = student(prefix[None]).logits[0, -1].log_softmax(-1)
        log_mu = (log_p + 0.5 * torch.randn(size, generator=torch.Generator().manual_seed(1))).log_softmax(-1)
    batch = RolloutBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        behavior_logprobs=mask * log_mu[:, None],
        versions=torch.zeros(size, 4, dtype=torch.long),
        advantages=torch.zeros(size, 4, dtype=torch.double),
        token_weights=mask * log_mu.exp()[:, None],
        rewards=torch.zeros(size),
        group_index=torch.zeros(size, dtype=torch.long),
    )
    one = replace_rows(batch, 1)
    _, wanted, _ = gradient(models, one, divergence="reverse_kl")
    _, own, signals = gradient(models, batch, gradient="sampled")
    assert (own - wanted).norm() < 1e-9 * wanted.norm()
    with torch.no_grad():
        log_q = teacher(prefix[None]).logits[0, -1].log_softmax(-1)
    value = float((log_mu.exp() * signals["divergence"][:, 3]).sum())
    assert value == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum()), rel=1e-9)
    _, plain, _ = gradient(models, batch, gradient="sampled", importance_weights=False)
    assert (plain - wanted).norm() > 0.01 * wanted.norm()


def replace_rows(batch, num):
    chosen = batch.select(torch.arange(num), batch.input_ids.shape[1])
    return chosen.replace(token_weights=chosen.loss_mask.double())


def test_rewards_train_only_where_they_are_asked_to(models):
    batch = batch_of(models[0])
    _, alone, _ = gradient(models, batch)
    _, other, _ = gradient(models, batch.replace(advantages=-batch.advantages))
    assert torch.equal(alone, other)
    _, both, _ = gradient(models, batch, with_reward=True)
    student = models[0]
    objective = Objective(rl.Reinforce(), rl.BehaviorProximal(), None, None, 0.0, 0.0)
    loss, _ = objective(CausalPolicy(student), None, batch, 0)
    reward = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(student.parameters()))])
    assert (both - alone - reward).norm() < 1e-9 * both.norm()


def test_an_engine_is_a_teacher_of_sampled_tokens(models, tmp_path):
    batch = batch_of(models[0], temperature=1.0)
    there = rl.EngineTeacher(model=MODEL, engine=rl.EmbeddedEngine())
    distiller = Distiller(rl.Distillation(teacher=there, gradient="sampled"))
    distiller.open(CausalPolicy(models[0]), torch.device("cpu"))
    try:
        found = distiller.ready.sampled(batch)
    finally:
        distiller.close()
    with torch.no_grad():
        teacher = AutoModelForCausalLM.from_pretrained(MODEL).eval()
        expected = CausalPolicy(teacher)(batch.input_ids, batch.loss_mask).logprobs
    assert (found - expected).abs().max() < 1e-5


# -- runs -------------------------------------------------------------------------------------------------------------


class Curve(pl.Callback):
    """Mean divergence of each step."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        signals = pl_module.stabilizer_signals
        self.values.append(float(signals["divergence"][batch.loss_mask].mean()))


def run(steps, ckpt_path=None, keep=None, curve=None, **settings):
    """A policy with random weights learns from the shipped one; rewards are not in its loss."""
    torch.manual_seed(0)
    distillation = rl.Distillation(**(dict(teacher=MODEL) | settings))
    module = make_module(learning_rate=3e-3, random_init=True, distillation=distillation)
    data = make_data(schedule="fixed_lag", max_staleness=2, engine=barrier_engine(), group_size=1, reward=rl.no_reward)
    saving = [ModelCheckpoint(keep, "{step}", every_n_train_steps=3, save_top_k=-1)] if keep else []
    more = [] if curve is None else [curve]
    fit(module, data, steps, callbacks=[*more, *saving], ckpt_path=ckpt_path, enable_checkpointing=bool(keep))
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"divergence": "jsd"}, {"divergence": "forward_kl", "top_k": 4}, {"gradient": "sampled"}], ids=str
)
def test_a_student_learns_from_a_teacher_with_stale_states_and_one_completion_a_prompt(settings):
    curve = Curve()
    run(60, curve=curve, **settings)
    begin, end = (sum(part) / 3 for part in (curve.values[:3], curve.values[-3:]))
    assert end < 0.75 * begin, curve.values


def test_a_resumed_run_goes_on_to_the_bit_and_the_teacher_is_not_in_the_checkpoint(tmp_path):
    whole = run(6, keep=tmp_path)
    again = run(6, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert torch.equal(parameters(whole), parameters(again))
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert len(saved["state_dict"]) == len(whole.policy.state_dict())
    known = rl.PolicyModule.load_from_checkpoint(tmp_path / "step=3.ckpt").given["distillation"]
    assert known == rl.Distillation(teacher=MODEL)


class Failing(rl.Teacher):
    """A teacher in this process that fails when it is asked for the n-th time."""

    def __init__(self, number):
        self.number = number
        self.is_closed = False

    def open(self, student, device, mesh=None):
        opened = rl.LocalTeacher(model=MODEL).open(student, device)
        compare = opened.compare
        numbers = iter(range(1, 1000))

        def counted(batch, measure):
            if next(numbers) == self.number:
                raise EngineError("planted")
            return compare(batch, measure)

        opened.compare = counted
        opened.close = lambda: setattr(self, "is_closed", True)
        return opened


@pytest.mark.slow
def test_a_teacher_that_fails_within_a_step_loses_nothing(tmp_path):
    """In the second of two micro-batches; the step is done again by a run that goes on to the bit."""

    def trained(number=0, ckpt_path=None):
        torch.manual_seed(0)
        teacher = Failing(number)
        module = make_module(random_init=True, distillation=rl.Distillation(teacher=teacher))
        data = make_data(
            schedule="fixed_lag",
            max_staleness=2,
            engine=barrier_engine(),
            micro_batches_per_step=2,
            reward=rl.no_reward,
        )
        settings = dict(callbacks=[SaveOnFailure()], default_root_dir=tmp_path, enable_checkpointing=True)
        if number:
            with pytest.raises(EngineError, match="planted"):
                fit(module, data, 6, **settings)
        else:
            fit(module, data, 6, ckpt_path=ckpt_path, **settings)
        assert teacher.is_closed
        return parameters(module)

    whole = trained()
    trained(number=8)
    assert torch.equal(trained(ckpt_path=str(tmp_path / "failed.ckpt")), whole)


@pytest.mark.slow
def test_fit_needs_no_reward_and_says_nothing_of_missing_signal(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = rl.fit(
        MODEL,
        [{"prompt": "3142="}] * 8,
        max_steps=25,
        groups_per_step=2,
        group_size=1,
        accelerator="cpu",
        distillation=rl.Distillation(teacher=MODEL),
    )
    assert "policy/teacher_divergence" in trainer.callback_metrics
    said = capsys.readouterr()
    assert "nothing was learned" not in said.out + said.err + caplog.text


def test_the_configuration_trains(tmp_path):
    small = ["--trainer.max_steps", "1", "--data.groups_per_step", "4", "--trainer.limit_val_batches", "0"]
    small += ["--trainer.logger.init_args.save_dir", str(tmp_path)]
    main(["--config", "configs/distill.yaml", *small])
    assert "policy/teacher_divergence" in next(tmp_path.rglob("metrics.csv")).read_text()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(beta=1.0), "model.distillation.beta must be between 0 and 1, got 1.0"),
        (dict(coefficient=0.0), "model.distillation.coefficient must be positive, got 0.0"),
        (dict(top_k=0), "model.distillation.top_k must be"),
        (
            dict(gradient="sampled", divergence="jsd"),
            "sampled uses only the sampled token, so it cannot be combined with divergence=jsd",
        ),
        (dict(gradient="sampled", top_k=4), "so it cannot be combined with top_k=4: use gradient: analytic"),
        (
            dict(teacher=rl.EngineTeacher(model=MODEL, engine=rl.EmbeddedEngine())),
            "teacher=EngineTeacher gives only the log-probabilities of sampled tokens",
        ),
        (
            dict(teacher=rl.ServerTeacher(base_url="http://127.0.0.1:1/v1", model="m")),
            "teacher=ServerTeacher gives no distributions over the whole vocabulary: set model.distillation.top_k",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rl.Distillation(**(dict(teacher=MODEL) | settings))


def test_teachers_that_cannot_be_made():
    with pytest.raises(ValueError, match=r"LocalTeacher\.dtype must be the name of a torch dtype .*, got 'float17'"):
        rl.LocalTeacher(model=MODEL, dtype="float17")
    with pytest.raises(ValueError, match=r"EngineTeacher\.timeout_s must be positive, got -1\.0"):
        rl.EngineTeacher(model=MODEL, engine=rl.EmbeddedEngine(), timeout_s=-1.0)
    inner = rl.SourceTeachers(key="kind", teachers={"a": MODEL})
    for teachers in ({}, {"b": inner}):
        with pytest.raises(ValueError, match=r"SourceTeachers\.teachers must have a teacher for each source"):
            rl.SourceTeachers(key="kind", teachers=teachers)
    student = CausalPolicy(load_policy(MODEL))
    with pytest.raises(ValueError, match=r"LocalTeacher\.attn_implementation='none' cannot be used"):
        rl.LocalTeacher(model=MODEL, attn_implementation="none").open(student, torch.device("cpu"))


def test_what_only_the_start_can_know(tmp_path):
    with pytest.raises(ValueError, match=r"OptimalBaseline with model\.distillation\.with_reward=false"):
        make_module(loss=rl.Reinforce(), baseline=rl.OptimalBaseline(), distillation=rl.Distillation(teacher=MODEL))
    with pytest.raises(ValueError, match=r"model.distillation.top_k=500 must be less than the vocabulary size, \d+;"):
        run(1, top_k=500)
    remote = rl.EngineTeacher(model=MODEL, engine=rl.EmbeddedEngine())
    module = make_module(distillation=rl.Distillation(teacher=remote, gradient="sampled"))
    for sampling in (dict(temperature=0.7), dict(top_k=4)):
        data = make_data(sampling=rl.SamplingParams(max_tokens=8, **sampling))
        with pytest.raises(ValueError, match=f"EngineTeacher with data.sampling.{next(iter(sampling))}="):
            fit(module, data, 1)


def copy_with(folder, name, change):
    """A copy of the model whose file of the tokenizer is changed."""
    shutil.copytree(MODEL, folder)
    file = folder / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return str(folder)


def test_a_teacher_of_another_tokenizer_or_template_is_refused(tmp_path):
    def swapped(tokenizer):
        vocab = tokenizer["model"]["vocab"]
        vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
        return tokenizer

    other = copy_with(tmp_path / "other", "tokenizer.json", swapped)
    with pytest.raises(ValueError, match=r"teacher='.*other' has a different tokenizer from model\.model="):
        check_same_tokens(MODEL, other)
    first, second = (
        copy_with(tmp_path / name, "tokenizer_config.json", lambda config, name=name: config | {"chat_template": name})
        for name in ("first", "second")
    )
    with pytest.raises(ValueError, match=r"teacher='.*second' has a different chat template from model\.model="):
        check_same_tokens(first, second)
    check_same_tokens(MODEL, first)


# -- a server ---------------------------------------------------------------------------------------------------------


class Answering(BaseHTTPRequestHandler):
    """A server whose answers are set by the test: the failures, which a real one cannot be made to have."""

    body = b"{}"
    status = 200

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args):
        pass


def answer(*places):
    """As of vLLM."""
    return {"choices": [{"text": "", "index": 0, "prompt_logprobs": [None, *places]}]}


KEY = "3f2a9c77b1d84e6fa0c1"
STRANGE = (float("nan"), float("-inf"), 0.5)


def two_tokens():
    """A batch of a prompt of one token and a completion of one."""
    shape = (1, 2)
    return RolloutBatch(
        input_ids=torch.tensor([[3, 5]]),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=torch.tensor([[False, True]]),
        behavior_logprobs=torch.zeros(shape),
        versions=torch.zeros(shape, dtype=torch.long),
        advantages=torch.zeros(shape),
        token_weights=torch.zeros(shape),
        rewards=torch.zeros(1),
        group_index=torch.zeros(1, dtype=torch.long),
    )


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, {"choices": []}, "returned no log-probabilities of the prompt's tokens"),
        (200, "<html>", "JSONDecodeError"),
        *((200, answer({"5": {"logprob": value}}), f"gave {value} as the log-probability") for value in STRANGE),
        (
            200,
            answer({"5": {"logprob": -1.0, "decoded_token": "你"}}),
            "has a different tokenizer from .* token 5 is '你' on the server",
        ),
        (
            200,
            answer({"5": {"logprob": -1.0}, "99": {"logprob": -0.5}}),
            r"gave 1 tokens of model.distillation.top_k=2",
        ),
        (404, {"error": {"message": "no such model"}}, "no such model"),
        (401, {"error": {"message": f"bad key {KEY}"}}, r"bad key \*\*\*"),
        (200, {"choices": [{"text": "", "index": 0}]}, "returned no log-probabilities of the prompt's tokens"),
        (200, {"choices": [{"text": "", "prompt_logprobs": [None, {"5": {"logprob": "x"}}]}]}, "returned no log-prob"),
        (
            200,
            {"choices": [{"text": "", "prompt_logprobs": [None, {"99": {"logprob": -1.0}}]}]},
            "returned no log-prob",
        ),
    ],
)
def test_a_server_that_cannot_be_a_teacher_is_named(models, status, body, message, monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)
    body = body if isinstance(body, str) else json.dumps(body)
    handler = type("Handler", (Answering,), dict(status=status, body=body.encode()))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1"
        teacher = rl.ServerTeacher(base_url=address, model="m", tokenizer=MODEL, api_key_env="A_KEY").open(
            CausalPolicy(models[0]), torch.device("cpu")
        )
        try:
            with pytest.raises(EngineError, match=f"ServerTeacher.base_url={address}.*{message}"):
                teacher.likeliest(two_tokens(), 2)
        finally:
            teacher.close()
            server.shutdown()
