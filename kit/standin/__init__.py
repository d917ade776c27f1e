"""Stand-in checkpoints: a small trained Qwen3.5-shaped model with an MTP head, and what is made of it.

    corpus     agent sessions written from Python source: training text, tokenizer, and the replay trace
    modeling   the model in plain torch (trunk and MTP head), tensor names as on disk
    train      the training run, its evaluation and the checkpoint it writes

`modeling` and `train` need torch and are imported only by whoever trains or checks a checkpoint. `modeling`'s docstring
holds the conventions that every exporter relies on.
"""
