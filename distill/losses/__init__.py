"""Losses: sums over tokens, so that the loop divides once per optimizer step.

The teacher is a constant.

vocabulary   distributions over the next token: kl, reverse_kl, jsd, ce, and mixtures over one set of logits
criteria     their values on given logits, with the gradient in closed form
chunks       head and criterion a few tokens at a time, gradients formed in the forward pass
layers       hidden states and attention, layer by layer: hidden_mse, hidden_cosine, attention_output,
             attention_relation
"""
