"""Real speculative decoding over a Transformers target: what every other figure of acceptance is held against.

One prompt at a time. A round drafts a tree (`growth`; a chain is one), the target reads all of it in one forward pass
(`target`), a rule decides which path is kept (`rules`), and the drafter reads the kept tokens again with the target's
own states (`drafter`). `loop` puts these together; the rest asks prompts, keeps answers and adds up.
"""
