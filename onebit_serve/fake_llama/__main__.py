"""Run the fake: `python -m onebit_serve.fake_llama`."""

from __future__ import annotations

from .main import main

if __name__ == "__main__":
    main()
