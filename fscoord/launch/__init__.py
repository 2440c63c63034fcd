"""An elastic launcher: agents that find each other through a rendezvous, and run workers in rounds."""

from fscoord.launch.agent import Agent, Job, Outcome
from fscoord.launch.announcer import Announcer
from fscoord.launch.held import Ending, run_held
from fscoord.launch.worker import Console, Failure, Streams, parse_streams

__all__ = [
    "Agent",
    "Announcer",
    "Console",
    "Ending",
    "Failure",
    "Job",
    "Outcome",
    "Streams",
    "parse_streams",
    "run_held",
]
