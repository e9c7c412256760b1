"""Typed run configs (`schema`, `train_schema`) and how they are read (`loading`)."""

from eagle3.config.base import Section
from eagle3.config.bench_schema import BenchConfig, LoadSection
from eagle3.config.cache import CacheSection
from eagle3.config.decode_schema import DecodeConfig, PromptsSection
from eagle3.config.launch_schema import LaunchConfig
from eagle3.config.loading import build_config, dump_config, field_help, load_config
from eagle3.config.plan_schema import BaselinePoint, CostSection, MeasuredPoint, PlanConfig, ScaleSection, TreeSection
from eagle3.config.regenerate_schema import AnswerServerSection, PriceSection, RegenerateConfig
from eagle3.config.schema import (
    ConversationsConfig,
    ExtractConfig,
    ImportConfig,
    RingWriteSection,
    ServeConfig,
    StreamSection,
    TargetConfig,
)
from eagle3.config.sweep_schema import SweepConfig, SweepTree
from eagle3.config.train_schema import (
    DraftSection,
    EarlyStoppingSection,
    MomentKind,
    Moments,
    OptimSection,
    RingReadSection,
    RopeSection,
    TrackingSection,
    TrainConfig,
    TTTSection,
)

__all__ = [
    "AnswerServerSection",
    "BaselinePoint",
    "BenchConfig",
    "CacheSection",
    "ConversationsConfig",
    "CostSection",
    "DecodeConfig",
    "DraftSection",
    "EarlyStoppingSection",
    "ExtractConfig",
    "ImportConfig",
    "LaunchConfig",
    "LoadSection",
    "MeasuredPoint",
    "MomentKind",
    "Moments",
    "OptimSection",
    "PlanConfig",
    "PriceSection",
    "PromptsSection",
    "RegenerateConfig",
    "RingReadSection",
    "RingWriteSection",
    "RopeSection",
    "ScaleSection",
    "Section",
    "ServeConfig",
    "StreamSection",
    "SweepConfig",
    "SweepTree",
    "TTTSection",
    "TargetConfig",
    "TrackingSection",
    "TrainConfig",
    "TreeSection",
    "build_config",
    "dump_config",
    "field_help",
    "load_config",
]
