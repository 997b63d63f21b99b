"""Metrics of a run: name, unit and meaning. `docs/metrics.md` is generated from this list."""

from __future__ import annotations

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """A logged metric; `<...>` in its name is a variable part."""

    name: str
    unit: str
    meaning: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the logged names; `grad/*` and `gac/*` end in the optimizer's position if there are several."""
        pieces = re.split(r"<[^>]+>", self.name)
        return re.compile(".+".join(map(re.escape, pieces)) + (r"(/\w+)?" if self.name[:4] in ("grad", "gac/") else ""))


def _metrics(rows: str) -> list[Metric]:
    return [Metric(*(cell.strip() for cell in row.split("|"))) for row in rows.strip().splitlines()]


METRICS: dict[str, list[Metric]] = {
    "RolloutMonitor": _metrics("""
        reward/mean | reward | mean reward of the completions that the step trained on
        reward/std | reward | their standard deviation
        reward/mean_sampled | reward | mean over the groups scored since the last step, before filters
        reward/part/<name> | reward | mean of a part of the reward, where it applies
        rollout/length_mean | tokens | mean length of the completions
        rollout/cut_share | share | completions that were cut at their limit, `sampling.max_tokens`
        rollout/no_signal_share | share | completions all of whose advantages are 0
        policy/entropy | nats | mean entropy of the policy over the trained tokens
        policy/loss | loss | of the step, with penalties; only its gradient means something
        policy/reference_kl | nats | KL(policy, reference) per token, where there is a reference
        policy/teacher_divergence | nats | divergence from the teacher per token, under distillation
        sample/dropped_share | share | groups scored since the last step that filters dropped
        sample/dropped_token_share | share | tokens dropped since the last step, of those dropped or trained on
    """),
    "StalenessMonitor": _metrics("""
        sample/staleness_mean | versions | mean age of the trained tokens
        sample/staleness_p95 | versions | 95th percentile of their age
        sample/staleness_max | versions | greatest age; at most `max_staleness` of `data`, `data.replay` or a tape's run
        sample/inter_rollout_lag | versions | version in training less that of a rollout's newest token, mean
        sample/intra_rollout_lag | versions | version of a rollout's newest token less that of its oldest, mean
        sample/mixed_version_share | share | completions sampled by more than one version
    """),
    "ImportanceMonitor": _metrics("""
        importance/ess_ratio | share | effective sample size over the number of completions
        importance/ess_ratio_token | share | effective sample size over the number of tokens
        importance/kl_k1 | nats | KL between behavior policy and policy per token, estimator k1
        importance/kl_k2 | nats | the same, estimator k2
        importance/kl_k3 | nats | the same, estimator k3
        importance/ratio_max | ratio | greatest importance ratio of a token
        importance/clip_fraction | share | tokens whose gradient or weight the loss cuts, by more than rounding
    """),
    "EngineCheck": _metrics("""
        engine/logprob_error | nats | mean absolute difference of log-probabilities, engine and trainer at one version
        engine/logprob_error_max | nats | the largest difference among the replayed tokens
    """),
    "FreshDataMonitor": _metrics("""
        fresh/ratio_mean | ratio | mean importance ratio of tokens under the weights that sampled them; must be 1
        fresh/log_ratio_mean | nats | mean of its logarithm; must be 0 but for rounding
        fresh/log_ratio_slope | nats/nat | its change with the token's log-probability; must be 0
        ratio/discrepancy | nats | root mean square of log-ratios between engine and trainer at one version
        ratio/staleness | nats | the same of what the log-ratios of the step have beyond it, between versions
    """),
    "RewardHackingMonitor": _metrics("""
        hacking/length_growth | ratio | mean length of the last 20 steps over that of at most 100 steps before
        hacking/repetition | share | of a completion's 4-grams that were there before, mean
        hacking/special_tokens | share | completions with a special token before their end
        hacking/group_std | reward | standard deviation of rewards within a group, mean
        hacking/disagreement | share | right completions that the second grader calls wrong
        hacking/num_signs | signs | of reward hacking that hold
    """),
    "ThroughputMonitor": _metrics("""
        perf/step_s | s | from the end of one optimizer step to the end of the next
        perf/tokens_per_s | tokens/s | completion tokens trained on
        perf/rollout_wait_s | s | the trainer waited for rollouts in this step
        perf/trainer_wait_share | share | of the time since the last step in which the trainer waited
        perf/engine_idle_share | share | of the time since the last step in which the engine did not generate
        sample/queue_size | groups | finished, and not yet trained on
        sample/unfinished | groups | being sampled or scored
        sample/lost | groups | dropped in the step as redundant or too old
        sample/total_tokens | tokens | generated since the run began
        perf/computed_share | share | tokens that training computes, of those of separate rows, with `model.packing`
    """),
    "GradientMonitor": _metrics("""
        grad/norm | norm | L2 norm of the gradient, before clipping
        grad/cosine | cosine | with the gradient of the step before
    """),
    "WeightSync": _metrics("""
        perf/weight_sync_s | s | the trainer published weights
    """),
    "ReplicaScaling": _metrics("""
        perf/replicas | replicas | that the engine has, or is about to have
    """),
    "BottleneckVerdict": _metrics("""
        perf/overlap_efficiency | share | of the shorter side (generation, training) hidden behind the longer one
        perf/trainer_share | share | of the window in which the trainer did not wait
        perf/weight_sync_share | share | of the window spent publishing
        perf/scoring_share | share | of the window in which a reward worker scored
        perf/share_to_win | share | of the window that removing the bottleneck would save at most
        perf/steady_staleness | versions | passing while a group is under way, if no step waits; lower bounds wait
    """),
    "PolicyModule": _metrics("""
        optim/lr | rate | learning rate of the schedule, before `ess/lr_scale`
        val/pass@<k> | share | held-out prompts solved, or by one of k completions (estimated without bias)
        val/reward | reward | mean reward on held-out prompts
        val/cut_share | share | completions of held-out prompts that were cut at their limit
    """),
    "SFTModule": _metrics("""
        train/loss | nats | mean of -log pi over the trained tokens of the step
        train/tokens | tokens | that the step trained on
        val/loss | nats | mean of -log pi over the trained tokens of held-out records
        val/token_accuracy | share | of these tokens that are the likeliest
    """),
    "SkipNonFinite": _metrics("""
        grad/num_skipped | steps | dropped so far because a gradient was not finite; from the first on
    """),
    "Evaluation": _metrics("""
        eval/<data set>/pass@<k> | share | of its prompts, estimated without bias
        eval/<data set>/reward | reward | mean over its prompts
        eval/pass@<k> | share | of all prompts together
        eval/reward | reward | mean over all prompts together
        eval/<data set>/cut_share | share | completions that were cut at their limit
        eval/cut_share | share | of all prompts together
        eval/version | version | of the policy that is evaluated
        eval/oldest_version | version | of any token
        eval/newest_version | version | of any token
        eval/mean_version | version | mean over the tokens
        eval/num_unscored | prompts | without a reward
        eval/seconds | s | from the first request to the last reward
        eval/blocked_s | s | training waited for the evaluation
    """),
    "LMEvalValidation": _metrics("""
        lm_eval/<task>/<metric> | as the task | of a task of lm-eval; `_stderr` behind it is its standard error
    """),
    "LengthBiasMonitor": _metrics("""
        intake/<fate>_share | share | groups with this fate: trained, expired, unbegun, or dropped by a filter
        intake/<fate>_length | tokens | mean length of their completions
        intake/<fate>_s | s | from admission to the last token
        intake/<fate>_pass_rate | share | measured pass rate of their prompts
    """),
    "ReplayMonitor": _metrics("""
        replay/num_rollouts | completions | in the buffer
        replay/num_prompts | prompts | in the buffer
        replay/num_added | completions | new ones so far
        replay/num_duplicates | completions | so far that replaced an equal older one
        replay/num_evicted | completions | removed so far because the buffer was full
        replay/num_expired | completions | removed so far because they were too old
        replay/num_replayed | completions | of the step that came from the buffer
        replay/replayed_staleness | versions | their mean age
        replay/replayed_staleness_max | versions | their greatest age
        sample/off_policy_share | share | trained tokens that are not of the newest version
    """),
    "ESSLearningRate": _metrics("""
        ess/ratio | share | effective sample size over the number of completions
        ess/lr_scale | factor | of the learning rate
        ess/num_samples | completions | that were weighted
        ess/num_broken | completions | whose log-ratio is not finite
    """),
    "GradientAlignmentControl": _metrics("""
        gac/cosine | cosine | with the reference gradient
        gac/regime | number | 0 applied, 1 projected, 2 skipped, 3 dropped
        gac/kept | factor | of the component along the reference
        gac/consecutive_skips | steps | skipped in a row
        gac/norm | norm | of the gradient, before the treatment
        gac/low | cosine | threshold of projection
        gac/high | cosine | threshold of skipping
        gac/num_dropped | steps | dropped so far
    """),
    "GradientClipping": _metrics("""
        grad/clip_scale | factor | of the gradient: 1 unchanged, 0 dropped
        grad/num_dropped | steps | dropped so far, not by `SkipNonFinite`
    """),
    "CollapseAlarm": _metrics("""
        collapse/ess_ratio | share | effective sample size over the number of completions
        collapse/kl | nats | KL between behavior policy and policy per token, estimator k3
        collapse/grad_norm | norm | of the gradient
        collapse/cosine | cosine | with the gradient of the step before
        collapse/entropy | nats | of the policy
        collapse/reward | reward | mean of the step
        collapse/num_alarms | alarms | so far
    """),
    "WeightDriftMonitor": _metrics("""
        drift/step | norm | distance of the trained weights from those before the last step
        drift/stale | norm | their distance from those that sampled the data, at the mean age
        drift/path | norm | sum of `drift/step`
        drift/total | norm | their distance from those of the start
        drift/radius | norm | distance at which half of the effective sample size would be left
        drift/half_lag | versions | lag at which `drift/stale` would be `drift/radius`
    """),
    "EstimatorBlend": _metrics("""
        blend/num_samples | completions | effective number of the step's, by raw sequence weights
        blend/share | share | of sequence weights in the step's estimator
    """),
    "StalenessController": _metrics("""
        controller/log_odds | nats | of a collapse within the next 20 steps
        controller/corrected | share | 1 once the loss is corrected, 0 before
        controller/lr_scale | factor | of the learning rate
        controller/bound | versions | `max_staleness` of groups admitted from now on
        controller/num_changes | changes | of correction, rate or bound so far
        controller/num_rollbacks | rollbacks | so far
    """),
    "AdaptiveStaleness": _metrics("""
        staleness/bound | versions | `max_staleness` of groups admitted from now on
        staleness/smoothed_ess_ratio | share | effective sample size, smoothed
        staleness/smoothed_kl | nats | KL, smoothed, where that is the target
    """),
    "JudgeReward": _metrics("""
        judge/num_verdicts | completions | that it was asked about so far; its `name` replaces `judge`
        judge/num_cached | answers | so far that were cached or already being requested
        judge/num_retries | requests | so far that were repeated
        judge/num_unreadable | answers | so far without a verdict
        judge/num_failed | questions | so far without an answer
        judge/num_substituted | completions | so far with the reward of `on_unreadable`, `on_failure` or `on_budget`
        judge/num_calls | requests | so far, those of earlier parts of a resumed run included
        judge/num_input_tokens | tokens | read by the judge so far, likewise
        judge/num_output_tokens | tokens | written by it so far, likewise
        judge/cost | currency | of `JudgeBudget`'s prices, so far, likewise
        judge/latency_s | s | mean of the last 1,000 requests that were answered
        judge/latency_p95_s | s | their 95th percentile
    """),
    "RewardModel": _metrics("""
        reward_model/num_scored | completions | so far; its `name` replaces `reward_model`
        reward_model/num_too_long | completions | so far
        reward_model/batch_size | completions | of a forward pass, mean
        reward_model/latency_s | s | from the end of a completion to its reward, mean of the last 1,000
    """),
    "AgentEngine": _metrics("""
        agent/num_calls | calls | of agents to the policy, in the episodes that have finished so far
        agent/num_rows | rows | of tokens that train, so far: one for each conversation that ended somewhere
        agent/num_orphans | replies | so far that no agent has read; they never train
        agent/num_side_turns | replies | so far to side calls
        agent/num_lost | completions | so far whose agent failed in all tries
        agent/num_healed | turns | so far that came back in another form, and whose sampled tokens were kept
        agent/drift_template | calls | so far that could not continue a conversation because of the chat template
        agent/drift_tokens | calls | so far that spelled a conversation in other tokens
        agent/drift_other | calls | so far that had changed a turn of the policy
    """),
    "CodeReward": _metrics("""
        code/num_right | completions | so far that passed all cases; its `name` replaces `code`
        code/num_wrong | completions | so far that failed a case, and ended by themselves
        code/num_no_code | completions | so far without a code block
        code/num_time | completions | so far that a limit of time ended
        code/num_memory | completions | so far that a limit of memory or processes ended
        code/num_output | completions | so far that wrote too much
        code/num_failed | completions | so far whose program failed by itself: an exception, a signal, another language
        code/num_weak | completions | so far of prompts with weak tests, which a program can forge
        code/num_programs | programs | run so far, one for each case or set of tests
        code/cpu_s | s | processor time of a program, mean
        code/latency_s | s | from the end of a completion to its reward, mean of the last 1,000
    """),
    "AnnealBeta": _metrics("""
        loss/beta | factor | current beta of the loss
    """),
}


def find(name: str) -> list[Metric]:
    """Entries that match a logged name; several callbacks may log the same one."""
    return [metric for metrics in METRICS.values() for metric in metrics if metric.pattern.fullmatch(name)]


def table() -> str:
    """All metrics as a Markdown table."""
    rows = [
        f"| `{metric.name}` | {metric.unit} | {metric.meaning} | `{source}` |"
        for source, metrics in METRICS.items()
        for metric in metrics
    ]
    return "\n".join(["| metric | unit | meaning | logged by |", "|---|---|---|---|", *rows]) + "\n"
