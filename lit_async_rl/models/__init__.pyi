from .lora import LoRA as LoRA
from .packing import PrefixTreePacking as PrefixTreePacking
from .packing import SharedPromptPacking as SharedPromptPacking
from .sharding import FSDPStrategy as FSDPStrategy
from .sharding import ModelParallelStrategy as ModelParallelStrategy
from .sharding import Sharding as Sharding
from .tokenizer import TextCodec as TextCodec
