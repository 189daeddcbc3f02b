"""Find the KV heads that need the whole context: documents that show it, and methods of scoring heads."""

from hpu_duo.lab.identify.attention import Band
from hpu_duo.lab.identify.dataset import DatasetSettings, PasskeyDataset, Sample
from hpu_duo.lab.identify.encoding import Encoder
from hpu_duo.lab.identify.gated_model import Form, FullFrom, GatedModel
from hpu_duo.lab.identify.identification import Identification, IdentifyRequest, Method, Progress
from hpu_duo.lab.identify.memory import TrainingMemory, training_memory
from hpu_duo.lab.identify.objective import LossForm, Schedule
from hpu_duo.lab.identify.optimise import GateTraining, TrainingSettings
from hpu_duo.lab.identify.workers import Workers, joined_workers
from hpu_duo.lab.tasks.haystack import BuiltinHaystack, Haystack, TextHaystack

__all__ = [
    "Band",
    "BuiltinHaystack",
    "DatasetSettings",
    "Encoder",
    "Form",
    "FullFrom",
    "GateTraining",
    "GatedModel",
    "Haystack",
    "Identification",
    "IdentifyRequest",
    "LossForm",
    "Method",
    "PasskeyDataset",
    "Progress",
    "Sample",
    "Schedule",
    "TextHaystack",
    "TrainingMemory",
    "TrainingSettings",
    "Workers",
    "joined_workers",
    "training_memory",
]
