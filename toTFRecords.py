"""Turns a folder of images into TFRecords of (pixels, image name), for test_tfrecords.py.

  python toTFRecords.py --image_dir data/test --output data/test.tfrecords

PNG, JPEG and GIF of any colour kind, also in folders below; each is decoded to RGB, resized to 32x32 where it is not, and
stored under its path relative to the folder. The output appears when it is complete; one that was there before is then
replaced.
"""

import collections
import concurrent.futures
import functools
import os
import sys

# first: it imports TensorFlow quietly
from data_input import (
  IMAGE_NAME,
  IMAGE_RAW,
  IMAGE_SIZE,
  NO_GPU,
  DataError,
  default_threads,
  natural_order,
  run,
  say,
  whole_file,
)

import tensorflow.compat.v1 as tf
from tqdm import tqdm

flags = tf.app.flags
FLAGS = flags.FlagValues()
flags.DEFINE_string('image_dir', 'data/test', 'folder of images', flag_values=FLAGS)
flags.DEFINE_string('output', 'data/test.tfrecords', 'file to write', flag_values=FLAGS)
flags.DEFINE_integer('num_threads', default_threads(), 'threads that read and decode', 1, flag_values=FLAGS)
flags.DEFINE_bool('skip_unreadable', False, 'leave out images that cannot be read, instead of ending', flag_values=FLAGS)

SUFFIXES = ('.png', '.jpg', '.jpeg', '.gif')
CHUNK = 1024  # images in memory at a time
GROUP = 16  # images decoded in one call: for a single one the call takes longer than the decoding


def list_images(folder):
  """Paths of the images in `folder` and below, relative to it and in natural order, and of all other files."""
  if not os.path.isdir(folder):
    raise DataError('--image_dir %s is no folder: give the folder of the images' % folder)
  images, others = [], []
  for root, folders, names in os.walk(folder, onerror=_raise):
    path = functools.partial(os.path.join, os.path.relpath(root, folder))
    # Hidden folders and those that macOS makes hold copies; links could lead in a circle.
    passed = [name for name in folders if name.startswith(('.', '__MACOSX')) or os.path.islink(os.path.join(root, name))]
    folders[:] = [name for name in folders if name not in passed]
    others += [os.path.normpath(path(name)) + os.sep for name in passed]
    for name in names:
      # macOS keeps a ._ file beside each file it copies: named as an image, but none.
      is_image = name.lower().endswith(SUFFIXES) and not name.startswith('.')
      (images if is_image else others).append(os.path.normpath(path(name)))
  if not images:
    raise DataError('no images in %s: it holds no %s file' % (folder, ', '.join(SUFFIXES)))
  images.sort(key=natural_order)
  ids = {}
  for name in images:
    twin = ids.setdefault(os.path.splitext(name)[0], name)
    if twin != name:
      raise DataError('%s and %s in %s would have the same id in the predictions: rename one' % (twin, name, folder))
  return images, others


def _raise(error):
  raise error


class Decoder(object):
  """Image files -> uint8 [32, 32, 3]; may be called from several threads."""

  def __init__(self):
    with tf.Graph().as_default(), tf.device('/cpu:0'):
      self._session = tf.Session(config=NO_GPU)
      self._contents = tf.placeholder(tf.string, [None])
      # The accurate method is what viewers use; the default differs by TensorFlow version.
      jpeg = functools.partial(tf.image.decode_jpeg, channels=3, dct_method='INTEGER_ACCURATE')
      png = functools.partial(tf.image.decode_png, channels=3)
      self._decoders = {magic: [decode(self._contents[i]) for i in range(GROUP)]
                        for magic, decode in ((b'\xff\xd8\xff', jpeg), (b'\x89PNG', png), (b'GIF8', png))}  # fmt: skip
      self._image = tf.placeholder(tf.uint8, [None, None, 3])
      small = tf.image.resize_images(self._image[None], [IMAGE_SIZE, IMAGE_SIZE], tf.image.ResizeMethod.AREA)[0]
      self._small = tf.cast(tf.round(small), tf.uint8)

  def __call__(self, paths):
    """Returns for each of at most GROUP paths: pixels, whether they were resized, and None; or None, False and the reason."""
    results, groups = {}, collections.defaultdict(dict)
    for path in paths:
      try:
        if os.path.exists(path) and not os.path.isfile(path):
          raise OSError(0, 'no regular file')  # opened, a pipe would wait for ever
        with open(path, 'rb') as f:
          contents = f.read()
        magic = next((magic for magic in self._decoders if contents.startswith(magic)), None)
        if magic:
          groups[magic][path] = contents
        else:
          results[path] = None, False, 'no PNG, JPEG or GIF' if contents else 'empty'
      except OSError as error:
        results[path] = None, False, error.strerror
    for magic, group in groups.items():
      results.update(self._decode(magic, group))
    return [results[path] for path in paths]

  def _decode(self, magic, group):
    """Decodes {path: contents} of one format in one call, or one by one where that shows which is damaged."""
    try:
      pixels = self._session.run(self._decoders[magic][: len(group)], {self._contents: list(group.values())})
    except tf.errors.OpError:
      if len(group) == 1:
        return dict.fromkeys(group, (None, False, 'damaged, or an animation'))
      return {path: self._decode(magic, {path: contents})[path] for path, contents in group.items()}
    return {path: self._resize(image) for path, image in zip(group, pixels)}

  def _resize(self, pixels):
    if pixels.shape == (IMAGE_SIZE, IMAGE_SIZE, 3):
      return pixels, False, None
    return self._session.run(self._small, {self._image: pixels}), True, None


def decode_all(folder, names, num_threads):
  """Yields (name, pixels, resized, error) for each of `names` in order; pixels or error is None."""
  decoder = Decoder()

  def decode(group):
    return decoder([os.path.join(folder, name) for name in group])

  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool, tqdm(total=len(names), unit=' images',
                                                                        disable=not sys.stderr.isatty()) as bar:  # fmt: skip
    for start in range(0, len(names), CHUNK):
      groups = [names[i : i + GROUP] for i in range(start, min(start + CHUNK, len(names)), GROUP)]
      for group, results in zip(groups, pool.map(decode, groups)):
        bar.update(len(group))
        for name, (pixels, resized, error) in zip(group, results):
          yield name, pixels, resized, error and '%s (%s)' % (name, error)


def example(name, pixels):
  """One image as a serialised tf.train.Example: its name, UTF-8 bytes, and its pixels, uint8 [32, 32, 3]."""
  feature = {IMAGE_RAW: pixels.tobytes(), IMAGE_NAME: name}
  feature = {key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value])) for key, value in feature.items()}
  return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(deterministic=True)


def convert(folder, names, output, num_threads, skip_unreadable):
  """Writes the images `names` of `folder` to `output`, whole or not at all.

  Returns the number written and the number resized, and a list of what could not be read.
  Raises DataError that names all unreadable images, unless `skip_unreadable`; flags.Error where the disk is full.
  """
  written, resized, unreadable = 0, 0, []
  with whole_file(output) as partial:
    try:
      with tf.python_io.TFRecordWriter(partial) as writer:
        for name, pixels, was_resized, error in decode_all(folder, names, num_threads):
          if error:
            unreadable.append(error)
          elif skip_unreadable or not unreadable:
            writer.write(example(os.fsencode(name.replace(os.sep, '/')), pixels))
            written, resized = written + 1, resized + was_resized
    except tf.errors.OpError as error:
      raise DataError('cannot write %s: %s' % (output, error.message))
    if unreadable and not skip_unreadable:
      raise DataError('%d of %d images in %s cannot be read: %s. Mend them, or leave them out with --skip_unreadable'
                      % (len(unreadable), len(names), folder, shorten(unreadable)))  # fmt: skip
    if not written:
      raise DataError('no image in %s can be read: %s' % (folder, shorten(unreadable)))
  return written, resized, unreadable


def shorten(names, shown=20):
  """The first names of a list, and how many more there are."""
  more = ', and %d more' % (len(names) - shown) if len(names) > shown else ''
  return ', '.join(names[:shown]) + more


def main(_):
  names, others = list_images(FLAGS.image_dir)
  if os.path.isdir(FLAGS.output):
    raise flags.Error('--output %s is a folder: give the name of a file' % FLAGS.output)
  if FLAGS.output.lower().endswith(SUFFIXES):
    raise flags.Error('--output %s would be taken for an image: give another name, such as test.tfrecords' % FLAGS.output)
  written, resized, unreadable = convert(FLAGS.image_dir, names, FLAGS.output, FLAGS.num_threads, FLAGS.skip_unreadable)
  print('%s: %d written, %d skipped, %d resized to %dx%d'
        % (FLAGS.output, written, len(unreadable), resized, IMAGE_SIZE, IMAGE_SIZE))  # fmt: skip
  for count, what, some in (
    (len(unreadable), 'skipped, unreadable', unreadable),
    (len(others), 'ignored, not ' + ', '.join(SUFFIXES), sorted(others)),
  ):
    if count:
      say('%d %s: %s' % (count, what, shorten(some)))


if __name__ == '__main__':
  run(main, FLAGS, __doc__)
