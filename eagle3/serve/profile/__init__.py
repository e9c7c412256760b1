"""Splits a decode cycle of a running SGLang into its parts, and says which change is worth trying first."""

from eagle3.serve.profile.capture import CaptureOptions, capture
from eagle3.serve.profile.report import profile_json, render_profile
from eagle3.serve.profile.result import Profile, profile_captured, profile_traces

__all__ = [
    "CaptureOptions",
    "Profile",
    "capture",
    "profile_captured",
    "profile_json",
    "profile_traces",
    "render_profile",
]
