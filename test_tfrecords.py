"""Predicts the images of a TFRecords file; writes CSV to stdout, ready for Kaggle's CIFAR-10.

  python test_tfrecords.py > preds.csv
  python test_tfrecords.py --tfrecords photos.tfrecords --probabilities > preds.csv

Rows are `id,label` in natural order of the ids (2 before 10): the image's name without suffix, and its class. Nothing is
printed before all rows are known.
"""

import os
import sys

# first: it imports TensorFlow quietly
from data_input import (
  CLASSES,
  IMAGE_BYTES,
  IMAGE_NAME,
  IMAGE_RAW,
  IMAGE_SIZE,
  DataError,
  batch_queue,
  natural_order,
  next_batch,
  preprocess,
  read_all,
  read_records,
  run,
  say,
)

import numpy as np
import pandas as pd
import tensorflow.compat.v1 as tf
from google.protobuf.message import DecodeError

import network

flags = tf.app.flags
FLAGS = flags.FlagValues()
flags.DEFINE_string('tfrecords', 'data/test.tfrecords', 'file that toTFRecords.py made', flag_values=FLAGS)
flags.DEFINE_string('checkpoint_dir', 'checkpoints', 'folder of checkpoints, or the prefix of one', flag_values=FLAGS)
flags.DEFINE_integer('batch_size', 128, 'images per step', 1, 1 << 16, flag_values=FLAGS)
flags.DEFINE_integer('num_threads', 16, 'reader threads', 1, flag_values=FLAGS)
flags.DEFINE_bool('probabilities', False, 'add ten columns, the probability of each class', flag_values=FLAGS)


def check_tfrecords(path):
  """Reads a TFRecords file once; returns how many images it holds.

  Raises DataError: no such file, damaged, empty, of another schema, or a name twice.
  """
  if not os.path.isfile(path):
    raise DataError('Failed to find file: %s. Make it with toTFRecords.py, or give another --tfrecords' % path)
  remedy = 'make it anew with toTFRecords.py'
  count, names = 0, set()
  try:
    for count, record in enumerate(tf.python_io.tf_record_iterator(path), 1):
      feature = tf.train.Example.FromString(record).features.feature
      raw, name = (feature[key].bytes_list.value for key in (IMAGE_RAW, IMAGE_NAME))
      if len(raw) != 1 or len(raw[0]) != IMAGE_BYTES or len(name) != 1:
        raise DataError('%s: record %d has no %s of %d bytes and one %s: %s'
                        % (path, count - 1, IMAGE_RAW, IMAGE_BYTES, IMAGE_NAME, remedy))  # fmt: skip
      names.add(name[0])
  except (tf.errors.OpError, DecodeError) as error:
    raise DataError('%s is damaged or no TFRecords file (%s): %s' % (path, getattr(error, 'message', error), remedy))
  if not count:
    raise DataError('%s is empty: %s' % (path, remedy))
  if len(names) != count:
    raise DataError('%s: %d records have only %d names: %s' % (path, count, len(names), remedy))
  return count


def tfrecords_batch(path, batch_size, num_threads):
  """A single pass over a TFRecords file: next float32 [<= batch, 28, 28, 3] for evaluation, and string [<= batch] names."""
  with tf.device('/cpu:0'), tf.name_scope('input'):
    _, records = read_records([path], tf.TFRecordReader(), batch_size, num_epochs=1)
    features = tf.parse_example(records, dict.fromkeys([IMAGE_RAW, IMAGE_NAME], tf.FixedLenFeature([], tf.string)))
    images = tf.reshape(tf.decode_raw(features[IMAGE_RAW], tf.uint8), [-1, IMAGE_SIZE, IMAGE_SIZE, 3])
    tensors = preprocess(images), features[IMAGE_NAME]
    return next_batch(batch_queue(tensors, num_threads), tensors)


def predict(path, count, checkpoint, batch_size, num_threads):
  """Names, bytes [count], and logits, float32 [count, 10], of the `count` images of a TFRecords file."""
  with tf.Graph().as_default():
    image_batch, name_batch = tfrecords_batch(path, batch_size, num_threads)
    logits = network.evaluation_network(image_batch, len(CLASSES)).logits
    with tf.Session(config=network.session_config()) as session:
      checkpoint = network.restore(session, tf.trainable_variables(), checkpoint)
      say('predicting with ' + checkpoint)
      session.run(tf.local_variables_initializer())
      return read_all(session, [name_batch, logits], count)


def to_csv(names, logits, probabilities):
  """The predictions as CSV text: one row per image, in natural order of the ids."""
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


if __name__ == '__main__':
  run(main, FLAGS, __doc__)
