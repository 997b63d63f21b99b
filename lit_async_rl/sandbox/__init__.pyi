from .sandbox import Program as Program
from .sandbox import ProgramResult as ProgramResult
from .sandbox import Sandbox as Sandbox
from .sandbox import SandboxError as SandboxError
from .sandbox import SandboxLimits as SandboxLimits
