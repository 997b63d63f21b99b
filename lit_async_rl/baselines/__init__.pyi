from .optimal import OptimalBaseline as OptimalBaseline
