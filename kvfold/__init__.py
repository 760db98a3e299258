"""kvfold: convert pretrained decoders to a much smaller KV cache, distil them back, measure what was recovered.

A checkpoint flows one way through pure steps; every stage reads model directories and writes a new one:

    source/ --convert--> folded/ --distill--> folded-distilled/        eval compares any of them with the source

Where things are (installed as kvfold.convert and so on; in the repository each folder stands at the top):

    convert   targets (GQA, MQA, MLA), the algebra from weights to weights, the lazy reader and the streamed writer
    distill   recipes, data, losses, the training loop and its exact resume
    eval      perplexity, KL to the teacher, cache measured from the live cache object
    recipes   complete runs, one YAML a file; recipes/demo is the bundled checkpoint
"""

__version__ = "0.1.0"
