"""Draws the report's pipeline view of the quick start, asynchronous and synchronous, one after the other.

python benchmarks/performance/report_picture.py --out docs/assets/report_pipeline.png
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import browser  # noqa: E402

from lit_async_rl.report import write_report  # noqa: E402

WIDTH = 1140
STEPS = 12
OVERLAYS = {"asynchronous": [], "synchronous": ["--config", "configs/quickstart_sync.yaml"]}


def train(folder: Path, name: str) -> Path:
    """Folder of a run of a few steps, without validation."""
    flags = ["--config", "configs/quickstart.yaml", *OVERLAYS[name], "--trainer.max_steps", str(STEPS)]
    flags += ["--data.validation.prompts", "null", "--trainer.val_check_interval", "null"]
    flags += ["--trainer.logger.init_args.save_dir", str(folder), "--trainer.logger.init_args.name", name]
    subprocess.run([sys.executable, "scripts/train.py", *flags], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return folder / name / "version_0"


def picture(report: Path) -> Image.Image:
    """Both charts of the pipeline view, one above the other."""
    from selenium.webdriver.support.ui import WebDriverWait

    with browser.chromium() as driver:
        browser.resize(driver, WIDTH, 3000)
        browser.show(driver, report, "pipeline")
        wait = WebDriverWait(driver, 30, 0.2)
        wait.until(lambda d: len(d.find_elements("css selector", ".gantt canvas")) >= len(OVERLAYS))
        charts = [one.find_element("css selector", ".chart") for one in driver.find_elements("css selector", ".gantt")]
        driver.execute_async_script("setTimeout(arguments[0], 1500)")  # bars grow into their places
        parts = [Image.open(io.BytesIO(chart.screenshot_as_png)) for chart in charts]
    whole = Image.new("RGB", (max(part.width for part in parts), sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    return whole


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs = [train(folder, name) for name in OVERLAYS]
        picture(write_report(*runs, out=folder / "report.html")).save(args.out, optimize=True)
    print(args.out)


if __name__ == "__main__":
    main()
