"""Tasks: where problems come from. One abstract class, then its members."""

from ssgrpo_lightning.tasks.arithmetic import ChainArithmetic
from ssgrpo_lightning.tasks.gym import ReasoningGym
from ssgrpo_lightning.tasks.probes import (
    CarelessChain,
    DecisiveLine,
    DecoyChain,
    FillerChain,
    RepairChain,
)
from ssgrpo_lightning.tasks.school_math import Gsm8k, Math
from ssgrpo_lightning.tasks.table import TableTask
from ssgrpo_lightning.tasks.task import Split, Task
from ssgrpo_lightning.tasks.tool_calls import ToolCalls
from ssgrpo_lightning.tasks.word_problems import WordProblems

__all__ = [
    "CarelessChain",
    "ChainArithmetic",
    "DecisiveLine",
    "DecoyChain",
    "FillerChain",
    "Gsm8k",
    "Math",
    "ReasoningGym",
    "RepairChain",
    "Split",
    "TableTask",
    "Task",
    "ToolCalls",
    "WordProblems",
]
