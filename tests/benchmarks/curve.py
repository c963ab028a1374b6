"""Prints the curve of a training run as text, from what train.py and val.py wrote for TensorBoard.

  python train.py --epochs 15 --keep_checkpoints 20 --save_steps 391 && python val.py --all
  python tests/benchmarks/curve.py checkpoints

A row an epoch: mean loss, cross-entropy and accuracy of its training steps (with dropout, on augmented images), images/s, and the
test accuracy that val.py found at the last checkpoint in it.
"""

import glob
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from data_input import run

import pandas as pd
import tensorflow.compat.v1 as tf

flags = tf.app.flags


def scalars(folder):
  """The scalars of a folder's event files: a DataFrame, a row a step, a column a tag; later files count."""
  points = {}
  for path in sorted(glob.glob(os.path.join(folder, 'events.*')), key=os.path.getmtime):
    for event in tf.train.summary_iterator(path):
      for value in event.summary.value:
        if value.HasField('simple_value'):
          points.setdefault(event.step, {})[value.tag] = value.simple_value
  return pd.DataFrame.from_dict(points, 'index').sort_index()


def main(folders):
  for folder in folders:
    if not glob.glob(os.path.join(folder, 'events.*')):
      raise flags.Error('no events of a training run in %s: give a checkpoint folder' % folder)
    train, test = scalars(folder), scalars(os.path.join(folder, 'eval'))
    epoch = (train['epoch'] - 1e-3).clip(lower=0).astype(int) + 1
    table = train.groupby(epoch)[['loss', 'cross_entropy', 'accuracy', 'images_per_second']].mean()
    if not test.empty:
      # A checkpoint is that of the epoch whose steps end nearest to it.
      ends = train['epoch'].reindex(test.index, method='nearest').round().astype(int)
      table['test_accuracy'] = test.groupby(ends)['accuracy'].last()
    percent = dict.fromkeys(['accuracy', 'test_accuracy'], '{:.1%}'.format)
    formats = dict(percent, loss='{:.3f}'.format, cross_entropy='{:.3f}'.format, images_per_second='{:.0f}'.format)
    print(table.reset_index().to_string(index=False, formatters=formats))


if __name__ == '__main__':
  run(main, flags.FlagValues(), __doc__, max_words=9)
