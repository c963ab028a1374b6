"""Validates checkpoints on the CIFAR-10 test set: each record exactly once, read by threads.

  python val.py                          the newest checkpoint of ./checkpoints
  python val.py checkpoints/model.ckpt-400
  python val.py --all                    ranks every checkpoint of the folder
  python val.py --watch                  beside train.py: each new checkpoint, until training is done
  python val.py --errors errors.png      also draws what the network is most confidently wrong about

Prints accuracy, cross-entropy, accuracy per class and the confusion matrix, and writes them for TensorBoard to `eval` in
the checkpoint folder.
"""

import math
import os
import time

from data_input import (
  CLASSES,
  Summaries,
  data_input,
  read_all,
  run,
  say,
  scalars,
  visible,
  warn,
  write_png,
)  # first: it imports TensorFlow quietly

import numpy as np
import pandas as pd
import tensorflow.compat.v1 as tf

import network

flags = tf.app.flags
FLAGS = flags.FlagValues()
flags.DEFINE_string('checkpoint_dir', 'checkpoints', 'folder of checkpoints, or the prefix of one', flag_values=FLAGS)
flags.DEFINE_string('data_dir', 'data', 'folder with the .bin files, or the one above it', flag_values=FLAGS)
flags.DEFINE_integer('batch_size', 128, 'images per step', 1, 1 << 16, flag_values=FLAGS)
flags.DEFINE_integer('num_threads', 16, 'reader threads', 1, flag_values=FLAGS)
flags.DEFINE_bool('all', False, 'validate and rank every checkpoint of the folder', flag_values=FLAGS)
flags.DEFINE_bool('watch', False, 'validate each new checkpoint once, until training is done', flag_values=FLAGS)

flags.DEFINE_string(
  'errors', None, 'PNG file to write: the most confident mistakes, true above predicted class', flag_values=FLAGS
)

POLL_SECONDS = 2  # between looks of --watch into the folder
POLLS_DONE = 5  # looks that must find training done: one that goes on in a finished folder first has to start


def score(labels, logits):
  """Accuracy and cross-entropy of a whole pass.

  Args:
    labels: integers [records]; logits: float [records, classes].
  Returns:
    dict: correct, total, accuracy, cross_entropy (mean, in nats), confusion (int [classes, classes], rows are true).
  """
  num_classes = logits.shape[1]
  confusion = np.bincount(labels * num_classes + logits.argmax(1), minlength=num_classes**2)
  confusion = confusion.reshape(num_classes, num_classes)
  shifted = logits - logits.max(1, keepdims=True).astype(np.float64)
  losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
  correct, total = int(confusion.trace()), len(labels)
  # fsum is exact, so the order in which threads read does not show in the last digits.
  return {'correct': correct, 'total': total, 'accuracy': correct / total,
          'cross_entropy': math.fsum(losses) / total, 'confusion': confusion}  # fmt: skip


def class_table(confusion):
  """Records, right ones and accuracy of each class, as a DataFrame."""
  table = pd.DataFrame({'records': confusion.sum(1), 'correct': confusion.diagonal()}, CLASSES)
  table['accuracy'] = table['correct'] / table['records'].clip(lower=1)
  return table


def report(result):
  """The result of one checkpoint as text."""
  confusion = pd.DataFrame(result['confusion'], CLASSES, CLASSES)
  classes = class_table(result['confusion']).to_string(formatters={'accuracy': '{:.1%}'.format})
  return (
    '{checkpoint}\naccuracy {correct} / {total} = {accuracy:.2%}\ncross-entropy {cross_entropy:.4f}\n\n{classes}\n\n'
    'confusion matrix (rows: true class, columns: predicted)\n{confusion}\n'
  ).format(**dict(result, classes=classes, confusion=confusion.to_string()))


def write_summaries(result):
  """The same numbers for TensorBoard, under the tags that train.py uses, in `eval` beside the checkpoint."""
  values = {name: result[name] for name in ('accuracy', 'cross_entropy')}
  for name, accuracy in class_table(result['confusion'])['accuracy'].items():
    values['class_accuracy/' + name] = accuracy
  rows = [[''] + CLASSES, ['---'] * (1 + len(CLASSES))]
  rows += [['**%s**' % name] + list(row) for name, row in zip(CLASSES, result['confusion'])]
  text = '\n'.join(' | '.join(map(str, row)) for row in rows)
  metadata = tf.SummaryMetadata(plugin_data=tf.SummaryMetadata.PluginData(plugin_name='text'))
  summary = scalars(values)
  summary.value.add(tag='confusion_matrix', metadata=metadata, tensor=tf.make_tensor_proto([text], tf.string))
  summaries = Summaries(os.path.join(os.path.dirname(result['checkpoint']), 'eval'))
  summaries.add(summary, network.checkpoint_step(result['checkpoint']))
  summaries.close()


# The letters that class names have, 8 by 5 pixels each: no requirement can draw text.
LETTERS = 'abcdefghiklmnoprstu'
FONT = [
  '..... #.... ..... ....# ..... ..##. ..... #.... ..#.. #.... .##.. ..... ..... ..... ..... ..... ..... .#... .....',
  '..... #.... ..... ....# ..... .#... ..... #.... ..... #.... ..#.. ..... ..... ..... ..... ..... ..... .#... .....',
  '.###. ####. .#### .#### .###. ####. .#### ####. .##.. #..#. ..#.. ##.#. ####. .###. ####. #.##. .#### ####. #...#',
  '....# #...# #.... #...# #...# .#... #...# #...# ..#.. #.#.. ..#.. #.#.# #...# #...# #...# ##... #.... .#... #...#',
  '.#### #...# #.... #...# ##### .#... #...# #...# ..#.. ##... ..#.. #.#.# #...# #...# #...# #.... .###. .#... #...#',
  '#...# #...# #.... #...# #.... .#... .#### #...# ..#.. #.#.. ..#.. #.#.# #...# #...# ####. #.... ....# .#... #...#',
  '.#### ####. .#### .#### .###. .#... ....# #...# .###. #..#. .###. #.#.# #...# .###. #.... #.... ####. ..##. .####',
  '..... ..... ..... ..... ..... ..... .###. ..... ..... ..... ..... ..... ..... ..... #.... ..... ..... ..... .....',
]
SHEET = 5, 8  # rows and columns of mistakes
WHITE, RED = (255, 255, 255), (255, 90, 80)


def draw_word(word, width, colour):
  """A word in pixels twice the font's size on black, uint8 [20, width, 3]."""
  font = np.array([list(row.ljust(6 * len(LETTERS))) for row in FONT]) == '#'
  letters = [font[:, 6 * i : 6 * i + 6] for i in map(LETTERS.index, word)]
  mask = np.concatenate(letters, 1).repeat(2, 0).repeat(2, 1)
  mask = np.pad(mask, [(4, 0), (4, width - 4 - mask.shape[1])], 'constant')
  return mask[:, :, None] * np.array(colour, np.uint8)


def draw_errors(path, labels, logits, images, scale=5):
  """Writes a PNG sheet of the mistakes with the highest predicted probability, the highest first.

  `images` as the network sees them, float32 [records, 28, 28, 3]. Returns how many are shown; with none there is no file.
  """
  predicted = logits.argmax(1)
  confidence = 1 / np.exp(logits - logits.max(1, keepdims=True).astype(np.float64)).sum(1)
  wrong = np.flatnonzero(predicted != labels)
  worst = wrong[np.lexsort((predicted[wrong], labels[wrong], -confidence[wrong]))][: SHEET[0] * SHEET[1]]
  tiles = []
  for i in worst:
    pixels = visible(images[i]).repeat(scale, 0).repeat(scale, 1)
    words = [draw_word(CLASSES[c], pixels.shape[1], colour) for c, colour in ((labels[i], WHITE), (predicted[i], RED))]
    tiles.append(np.pad(np.concatenate([pixels] + words), [(4, 4), (4, 4), (0, 0)], 'constant'))
  if tiles:
    tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % SHEET[1])
    write_png(path, np.concatenate([np.concatenate(tiles[i : i + SHEET[1]], 1) for i in range(0, len(tiles), SHEET[1])]))
  return len(worst)


class Validation(object):
  """The evaluation graph; calling it with a folder or prefix validates that checkpoint, prints and returns the result."""

  def __init__(self, data_dir, batch_size, num_threads, errors=None):
    self._errors = errors
    self._data = data_input(data_dir, batch_size, len(CLASSES), False, num_threads)
    logits = network.NETWORK(self._data.image_batch, self._data.label_batch, 1, len(CLASSES), False).logits
    self._fetches = [tf.argmax(self._data.label_batch, 1), logits] + [self._data.image_batch] * bool(errors)

  def __call__(self, path):
    # A session each: queues that have ended stay closed within one.
    with tf.Session(config=network.session_config()) as session:
      checkpoint = network.restore(session, tf.trainable_variables(), path)
      session.run(tf.local_variables_initializer())
      labels, logits, *images = read_all(session, self._fetches, self._data.num_records)
    result = dict(score(labels, logits), checkpoint=checkpoint)
    print(report(result), flush=True)
    if self._errors:
      print('%s: %d mistakes, true class above predicted' % (self._errors, draw_errors(self._errors, labels, logits, *images)))
    write_summaries(result)
    return result


def results_of(validate, prefixes):
  """Yields the result of each checkpoint that can be read; of the others, which training may have deleted, a warning."""
  for prefix in prefixes:
    try:
      yield validate(prefix)
    except network.CheckpointError as error:
      warn(str(error))


def rank(validate, folder):
  """Validates every checkpoint of `folder` and prints them from best to worst."""
  results = list(results_of(validate, network.list_checkpoints(folder)))
  if not results:
    raise network.CheckpointError('no checkpoint in the folder %s can be read: give another one' % folder)
  table = pd.DataFrame(results, columns=['checkpoint', 'accuracy', 'cross_entropy'])
  table = table.sort_values(['accuracy', 'cross_entropy'], ascending=[False, True])
  print(table.to_string(index=False, formatters={'accuracy': '{:.2%}'.format, 'cross_entropy': '{:.4f}'.format}))
  print('best: %s' % table['checkpoint'].iloc[0])


def watch(validate, folder):
  """Validates each checkpoint that appears in `folder` once, until train.py says that it was the last."""
  say('waiting for checkpoints in %s' % folder)
  seen, polls_done = set(), 0
  while polls_done < POLLS_DONE:
    polls_done = polls_done + 1 if os.path.exists(os.path.join(folder, network.TRAINING_DONE)) else 0
    new = [prefix for prefix in network.list_checkpoints(folder) if prefix not in seen]
    for _ in results_of(validate, new):
      pass
    seen.update(new)
    time.sleep(POLL_SECONDS)


def main(words):
  path = words[0] if words else FLAGS.checkpoint_dir
  if FLAGS.all and FLAGS.watch:
    raise flags.Error('--all and --watch exclude each other: give one of them')
  if FLAGS.errors and (FLAGS.all or FLAGS.watch):
    raise flags.Error('--errors is of one checkpoint: leave out --all and --watch')
  network.refuse_wildcards(path)
  if not FLAGS.watch:
    network.find_checkpoint(path)
  if (FLAGS.all or FLAGS.watch) and (os.path.exists(path) or os.path.exists(path + '.index')) and not os.path.isdir(path):
    raise flags.Error('--all and --watch take a folder, not %s' % path)
  with tf.Graph().as_default():
    validate = Validation(FLAGS.data_dir, FLAGS.batch_size, FLAGS.num_threads, FLAGS.errors)
    if FLAGS.all:
      rank(validate, path)
    elif FLAGS.watch:
      watch(validate, path)
    else:
      validate(path)


if __name__ == '__main__':
  run(main, FLAGS, __doc__, max_words=1)
