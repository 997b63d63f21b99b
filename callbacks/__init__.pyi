__all__: list[str]

from .monitors.bottleneck_verdict import BottleneckVerdict as BottleneckVerdict
from .monitors.gradient_monitor import GradientMonitor as GradientMonitor
from .monitors.importance_monitor import ImportanceMonitor as ImportanceMonitor
from .monitors.length_bias_monitor import LengthBiasMonitor as LengthBiasMonitor
from .monitors.replay_monitor import ReplayMonitor as ReplayMonitor
from .monitors.rollout_monitor import RolloutMonitor as RolloutMonitor
from .monitors.run_summary import RunSummary as RunSummary
from .monitors.staleness_monitor import StalenessMonitor as StalenessMonitor
from .monitors.throughput_monitor import ThroughputMonitor as ThroughputMonitor
from .run.evaluation import Evaluation as Evaluation
from .run.linked_checkpoint import LinkedCheckpoint as LinkedCheckpoint
from .run.progress import Progress as Progress
from .run.rollout_tape import RolloutTape as RolloutTape
from .run.sample_logger import SampleLogger as SampleLogger
from .run.save_on_failure import SaveOnFailure as SaveOnFailure
from .run.save_on_sigterm import SaveOnSigterm as SaveOnSigterm
from .run.weight_sync import WeightSync as WeightSync
from .stabilizers.adaptive_staleness import AdaptiveStaleness as AdaptiveStaleness
from .stabilizers.anneal_beta import AnnealBeta as AnnealBeta
from .stabilizers.collapse_alarm import CollapseAlarm as CollapseAlarm
from .stabilizers.ess_learning_rate import ESSLearningRate as ESSLearningRate
from .stabilizers.gradient_alignment_control import GradientAlignmentControl as GradientAlignmentControl
from .stabilizers.gradient_clipping import GradientClipping as GradientClipping
from .stabilizers.reference_reset import ReferenceReset as ReferenceReset
from .stabilizers.skip_non_finite import SkipNonFinite as SkipNonFinite
