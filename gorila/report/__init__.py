"""`gorila report`: one run as one HTML file that opens offline. gather.py collects, charts.py draws SVG, page.py writes HTML; the last two are pure."""

from gorila.report.gather import gather
from gorila.report.page import page

__all__ = ["gather", "page"]
