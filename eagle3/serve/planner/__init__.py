"""From what is known of a served drafter to its tokens/s at every step count; numbers only, no torch and no server."""

from eagle3.serve.planner.lines import Open
from eagle3.serve.planner.plan import Plan, make_plan
from eagle3.serve.planner.report import plan_json, render_plan
from eagle3.serve.planner.rows import BatchPlan, Line, Part, Row

__all__ = ["BatchPlan", "Line", "Open", "Part", "Plan", "Row", "make_plan", "plan_json", "render_plan"]
