"""Recordings of a run, read the same way wherever they lie: in Kafka, or in the Parquet files of `gorila archiver`.

`parse_source("parquet:DIR").open(cluster)` gives a Recording: the run as it was, what offsets there are, and the records in order, equal
byte for byte whichever way they came.
"""

from gorila.recording.kafka_source import KafkaRecording, Range
from gorila.recording.parquet_source import ParquetRecording
from gorila.recording.recorded import TOPICS, Missing, Recorded, Recording, Span
from gorila.recording.source import Source, parse_source

__all__ = [
    "TOPICS",
    "KafkaRecording",
    "Missing",
    "ParquetRecording",
    "Range",
    "Recorded",
    "Recording",
    "Source",
    "Span",
    "parse_source",
]
