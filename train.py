"""Train, validate, test or sample: `python train.py fit --config configs/quickstart.yaml`."""

from ssgrpo_lightning.cli import main

if __name__ == "__main__":
    main()
