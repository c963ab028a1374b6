"""Predicts the images of a TFRecords file; writes CSV to stdout, ready for Kaggle's CIFAR-10.

  python test_tfrecords.py > preds.csv
  python test_tfrecords.py --tfrecords photos.tfrecords --probabilities > preds.csv

Rows are `id,label` in natural order of the ids (2 before 10): the image's name without suffix, and its class. Nothing is
printed before all rows are known.
"""
import os
import sys

# first: it imports TensorFlow quietly
from data_input import CLASSES, check_tfrecords, natural_order, read_all, run, tfrecords_batch

import numpy as np
import pandas as pd
import tensorflow.compat.v1 as tf

import network

flags = tf.app.flags
FLAGS = flags.FlagValues()
flags.DEFINE_string('tfrecords', 'data/test.tfrecords', 'file that toTFRecords.py made', flag_values=FLAGS)
flags.DEFINE_string('checkpoint_dir', 'checkpoints', 'folder of checkpoints, or the prefix of one', flag_values=FLAGS)
flags.DEFINE_integer('batch_size', 128, 'images per step', 1, flag_values=FLAGS)
flags.DEFINE_integer('num_threads', 16, 'reader threads', 1, flag_values=FLAGS)
flags.DEFINE_bool('probabilities', False, 'add ten columns, the probability of each class', flag_values=FLAGS)


def predict(path, count, checkpoint, batch_size, num_threads):
  """Names, bytes [count], and logits, float32 [count, 10], of the `count` images of a TFRecords file."""
  config = tf.ConfigProto(allow_soft_placement=True)
  config.gpu_options.allow_growth = True
  with tf.Graph().as_default():
    image_batch, name_batch = tfrecords_batch(path, batch_size, num_threads)
    logits = network.NETWORK(image_batch, None, 1, len(CLASSES), False).logits
    with tf.Session(config=config) as session:
      print('predicting with ' + network.restore(session, tf.trainable_variables(), checkpoint), file=sys.stderr)
      session.run(tf.local_variables_initializer())
      return read_all(session, [name_batch, logits], count)


def to_csv(names, logits, probabilities):
  """The predictions as CSV text: a row an image, in natural order of the ids."""
  ids = [os.path.splitext(name.decode('utf-8', 'surrogateescape'))[0] for name in names]
  table = pd.DataFrame({'id': ids, 'label': np.array(CLASSES)[logits.argmax(1)]})
  if probabilities:
    exponents = np.exp(logits - logits.max(1, keepdims=True).astype(np.float64))
    table[CLASSES] = pd.DataFrame(exponents / exponents.sum(1, keepdims=True), columns=CLASSES)
  order = sorted(range(len(ids)), key=lambda row: natural_order(ids[row]))
  return table.iloc[order].to_csv(index=False, float_format='%.6f')


def main(_):
  network.find_checkpoint(FLAGS.checkpoint_dir)
  count = check_tfrecords(FLAGS.tfrecords)
  names, logits = predict(FLAGS.tfrecords, count, FLAGS.checkpoint_dir, FLAGS.batch_size, FLAGS.num_threads)
  text = to_csv(names, logits, FLAGS.probabilities).replace(os.linesep, '\n')
  sys.stdout.buffer.write(text.encode('utf-8', 'surrogateescape'))
  sys.stdout.flush()  # a full disk shows here, not after the exit status is settled


if __name__ == '__main__':
  run(main, FLAGS, __doc__)
