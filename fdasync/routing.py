"""Where formats of rows were."""

raise ImportError("formats of rows are fdasync_trainer.rows: pip install fdasync-trainer", name=__name__)
