from .program import Program as Program
from .program import ProgramResult as ProgramResult
from .program import SandboxError as SandboxError
from .program import SandboxLimits as SandboxLimits
from .sandbox import Sandbox as Sandbox
