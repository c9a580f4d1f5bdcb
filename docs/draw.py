"""Write docs/protocol-diagrams.md from the transition tables: ``python docs/draw.py``."""

from pathlib import Path

from pushkv.model.protocol import diagrams

if __name__ == "__main__":
    Path(__file__).with_name("protocol-diagrams.md").write_text(diagrams.text(), encoding="utf-8")
