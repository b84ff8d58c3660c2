"""The report of a run: one HTML page that holds everything, and findings in words."""

from rollout.observe.report.report import RunReport, write_report

__all__ = ["RunReport", "write_report"]
