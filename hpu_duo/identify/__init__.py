"""Find the KV heads that need the whole context: documents that show it, and methods of scoring heads."""

from hpu_duo.builtin.haystack import BuiltinHaystack, Haystack, TextHaystack
from hpu_duo.identify.attention import Band
from hpu_duo.identify.dataset import DatasetSettings, PasskeyDataset, Sample
from hpu_duo.identify.encoding import Encoder
from hpu_duo.identify.forms import Form
from hpu_duo.identify.gated_model import GatedModel
from hpu_duo.identify.gates import FullFrom
from hpu_duo.identify.identification import Identification, IdentifyRequest, Method, Progress
from hpu_duo.identify.memory import TrainingMemory, training_memory
from hpu_duo.identify.objective import LossForm, Schedule
from hpu_duo.identify.optimise import GateTraining, TrainingSettings
from hpu_duo.identify.workers import Workers, joined_workers

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
