"""An elastic launcher: agents that find each other through a rendezvous, and run workers in rounds."""

from fscoord.launch.agent import Agent, Failure, Job, Outcome
from fscoord.launch.held import Ending, run_held
from fscoord.launch.worker import Console, Streams, find_accelerators, parse_streams

__all__ = [
    "Agent",
    "Console",
    "Ending",
    "Failure",
    "Job",
    "Outcome",
    "Streams",
    "find_accelerators",
    "parse_streams",
    "run_held",
]
