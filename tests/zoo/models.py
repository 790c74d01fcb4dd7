"""All models of the zoo, by name."""

from tests.zoo.decoders import DECODERS
from tests.zoo.encoders import ENCODER_DECODERS, ENCODERS
from tests.zoo.entry import Entry
from tests.zoo.pictures_and_sounds import AUDIO, VISION
from tests.zoo.plain import PLAIN

__all__ = ["ZOO"]

ZOO: dict[str, Entry] = {e.name: e for e in (*DECODERS, *ENCODERS, *ENCODER_DECODERS, *VISION, *AUDIO, *PLAIN)}
