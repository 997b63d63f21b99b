from .html import write_report as write_report
