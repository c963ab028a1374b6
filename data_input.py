"""CIFAR-10 in: files found, checked and, where none are, downloaded; queues; augmentation.

  python data_input.py                          what the data set holds
  python data_input.py --synthetic              makes a small data set first: no network needed
  python data_input.py --preview preview.png    what the network is fed, beside the originals
  python data_input.py --benchmark              images/s of the training queue

A pixel's way: .bin bytes -> shuffle queue of raw records -> a batch decoded and augmented at once -> batch
queue -> towers, all on the CPU. `tests/benchmarks/run.py input` measures it against other pipelines.
"""

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import urllib.request

# oneDNN's kernels are several times faster here and off by default on some CPUs; a user's own setting wins.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')


@contextlib.contextmanager
def _quiet_import():
  """Keeps TensorFlow's informational lines off stderr; its warnings, and a user's own TF_CPP_MIN_LOG_LEVEL, stay.

  Where there is no NVIDIA driver, TensorFlow's own messages about its absence are left out too, which takes a level that
  leaves out all messages of its C++ part; train.py says it once. Errors of a run come as exceptions.
  TensorFlow 2.x writes some lines before it has read its own setting, so what the import prints is filtered here.
  """
  has_driver = os.path.exists('/proc/driver/nvidia') or os.path.exists('/dev/dxg')
  if os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1' if has_driver else '3') == '0':
    yield
    return
  try:
    stderr = os.dup(2)
  except OSError:  # closed
    yield
    return
  with tempfile.TemporaryFile() as printed:
    os.dup2(printed.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      printed.seek(0)
      noise = rb'I\d{4} |WARNING: All log messages before absl|.*: I tensorflow/'
      os.write(2, b''.join(line for line in printed if not re.match(noise, line)))


with _quiet_import():
  import tensorflow.compat.v1 as tf
import numpy as np  # noqa: E402, as the two below: after the quiet import
import pandas as pd  # noqa: E402
from tqdm import tqdm  # noqa: E402

CLASSES = ['airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck']
IMAGE_SIZE = 32  # pixels, as stored
CROP_SIZE = 28  # pixels, as the network sees them
IMAGE_BYTES = IMAGE_SIZE * IMAGE_SIZE * 3
RECORD_BYTES = 1 + IMAGE_BYTES  # a label, then the red, green and blue planes
QUEUE_BATCHES = 16  # ready for the towers: 19 MB at batch 128
TRAIN_FILES = ['data_batch_%d.bin' % i for i in range(1, 6)]
TEST_FILES = ['test_batch.bin']
FOLDER = 'cifar-10-batches-bin'
IMAGE_RAW, IMAGE_NAME = 'image_raw', 'image_name'  # features of a TFRecords image: uint8 RGB row by row; UTF-8
ARCHIVE = 'cifar-10-binary.tar.gz'
DATA_URL = 'https://www.cs.toronto.edu/~kriz/' + ARCHIVE
DATA_MD5 = 'c32a1d4ab5d03f1284b67883e8d87530'

flags = tf.app.flags
NO_GPU = tf.ConfigProto(device_count={'GPU': 0})  # for sessions that would only take memory there
# Every script has flags of its own instead of TensorFlow's global ones, so that all can be imported together.
FLAGS = flags.FlagValues()
flags.DEFINE_string('data_dir', 'data', 'folder with the .bin files, or the one above it', flag_values=FLAGS)
flags.DEFINE_bool('synthetic', False, 'make a small data set of ten shapes in --data_dir first', flag_values=FLAGS)
flags.DEFINE_string('preview', None, 'PNG file to write: each original, then what the network is fed', flag_values=FLAGS)
flags.DEFINE_bool('benchmark', False, 'measure images/s of the training queue', flag_values=FLAGS)


class DataError(flags.Error, ValueError):
  """The data cannot be used as it is; the message names the file, what is wrong and what would mend it."""


# ---------------------------------------------------------------- what all scripts share


def run(main, flag_values, doc, max_words=0):
  """Runs `main(words)` of a script: parses its flags, answers --help, ends a user's mistake with one `error:` line.

  Args:
    main: function of the list of words on the command line that are no flags; at most `max_words` are accepted.
    flag_values: the script's `FlagValues`.
    doc: the script's docstring, printed by --help.

  A mistake is a `flags.Error` (data, checkpoint or flag) or an `OSError` (permissions, full disk): exit status 1.
  Any other exception is a bug and keeps its traceback. SIGINT ends with status 130, SIGTERM with 143.
  """
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, _end_at_once)
  tf.get_logger().addFilter(lambda record: 'deprecated' not in record.getMessage())
  try:
    if {'-h', '-help', '--help'} & set(sys.argv[1:]):
      text = flag_values.get_help(include_special_flags=False).lstrip()
      print('%s\nFlags of %s' % (doc, text) if text else doc)
    else:
      flag_values.set_gnu_getopt(True)
      words = flag_values(sys.argv)[1:]
      if len(words) > max_words:
        raise flags.Error("unexpected word '%s' on the command line (see --help)" % words[max_words])
      main(words)
    sys.stdout.flush()  # a full disk shows here, while the exit status can still tell
  except (flags.Error, OSError) as error:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written is not tried again at exit
    sys.exit('error: ' + ' '.join(str(error).split()))


def say(text):
  """Writes a line to stderr, above the progress bar if there is one."""
  tqdm.write(text, file=sys.stderr)
  sys.stderr.flush()  # Python 3.7 would keep back what goes to a file


def warn(text):
  say('warning: ' + text)


class Summaries(object):
  """Writes points for TensorBoard to `folder`. Where that fails (a full disk) it warns once: they are not worth the run."""

  def __init__(self, folder):
    self._folder = folder
    self._writer = None

  def start(self, graph, step):
    """Begins a run at a step: what a killed run wrote beyond it is not shown."""
    self._write(lambda writer: writer.add_graph(graph))
    self._write(lambda writer: writer.add_session_log(tf.SessionLog(status=tf.SessionLog.START), step))

  def add(self, summary, step):
    """Adds a tf.Summary."""
    self._write(lambda writer: writer.add_summary(summary, step))

  def close(self):
    self._write(lambda writer: writer.close())

  def _write(self, action):
    try:
      if self._folder:
        self._writer = self._writer or tf.summary.FileWriter(self._folder)
        action(self._writer)
    except (tf.errors.OpError, RuntimeError, OSError) as error:
      self._folder = None
      warn('no summaries for TensorBoard: %s' % error)


def scalars(values):
  """A tf.Summary of {tag: number}."""
  return tf.Summary(value=[tf.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


_unfinished = set()  # temporary files that are being written


def _end_at_once(signum, _):
  # Not by an exception: raised at any place, it makes TensorFlow's destructors print.
  for path in _unfinished:
    _remove(path)
  os._exit(128 + signum)


def _remove(path):
  if os.path.isdir(path):
    shutil.rmtree(path)
  elif os.path.exists(path):
    os.remove(path)


@contextlib.contextmanager
def whole_file(path):
  """Yields a temporary name beside the file or folder `path`; it becomes `path` when the block ends well, else it goes.

  A file replaces one that is there; the files of a folder are added to it; what lacks of the folders above is made. Raises
  DataError where `path` is a device.
  """
  path = os.path.realpath(path)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
    raise DataError('%s is no regular file: give the name of one' % path)
  partial = '%s.%d.partial' % (path, os.getpid())
  _unfinished.add(partial)
  try:
    yield partial
    if os.path.isdir(partial) and os.path.isdir(path):
      for name in os.listdir(partial):
        os.replace(os.path.join(partial, name), os.path.join(path, name))
    else:
      os.replace(partial, path)
  finally:
    _unfinished.discard(partial)
    _remove(partial)


def natural_order(name):
  """Sort key that puts 2 before 10."""
  parts = re.split('([0-9]+)', name)
  parts[1::2] = map(int, parts[1::2])
  return parts, name


# ---------------------------------------------------------------- the data set on disk


def find_files(data_dir, names, num_classes):
  """Finds and checks `names` in `data_dir` or its cifar-10-batches-bin; downloads the set if no file of it is there.

  Returns:
    list of paths, and list of uint8 [records] with the labels of each file.
  Raises:
    DataError: a file is missing, cut, or holds a label of `num_classes` or more; the message names it.
  """
  if os.path.exists(data_dir) and not os.path.isdir(data_dir):
    raise DataError('--data_dir %s is a file: give the folder that holds the .bin files' % data_dir)
  folder = _data_folder(data_dir) or download(data_dir)
  paths = [os.path.join(folder, name) for name in names]
  missing = [path for path in paths if not os.path.isfile(path)]
  if missing:
    raise DataError('Failed to find file: %s. Put it there, or give another --data_dir' % ', '.join(missing))
  return paths, [check_file(path, num_classes) for path in paths]


def _data_folder(data_dir):
  """The folder that holds any file of the data set, or None."""
  for folder in (data_dir, os.path.join(data_dir, FOLDER)):
    if any(os.path.exists(os.path.join(folder, name)) for name in TRAIN_FILES + TEST_FILES):
      return folder
  return None


def check_file(path, num_classes):
  """Returns the labels of a .bin file, uint8 [records]; raises DataError where size or a label is impossible."""
  size = os.path.getsize(path)
  if size == 0 or size % RECORD_BYTES:
    raise DataError('%s has %d bytes, which is no whole number of %d-byte CIFAR-10 records: it is cut or another format. '
                    'Fetch it again' % (path, size, RECORD_BYTES))  # fmt: skip
  labels = np.array(np.memmap(path, np.uint8, 'r')[::RECORD_BYTES])
  wrong = np.flatnonzero(labels >= num_classes)
  if wrong.size:
    raise DataError('%s: record %d has label %d, but labels go from 0 to %d: the file is damaged or another format. '
                    'Fetch it again' % (path, wrong[0], labels[wrong[0]], num_classes - 1))  # fmt: skip
  return labels


def download(data_dir):
  """Fetches the official binary archive into `data_dir`, unless it lies there already, and unpacks it.

  Returns the folder of the .bin files. Raises DataError without network or where the MD5 stays wrong.
  """
  archive = os.path.join(data_dir, ARCHIVE)
  md5 = _md5(archive) if os.path.isfile(archive) else None
  if md5 != DATA_MD5:
    if md5:
      warn('%s has the MD5 %s instead of %s: it is cut or another archive, and is fetched anew' % (archive, md5, DATA_MD5))
    _fetch(DATA_URL, archive)
  folder = os.path.join(data_dir, FOLDER)
  with whole_file(folder) as partial, tarfile.open(archive) as tar:
    os.makedirs(partial)
    for member in tar:
      if member.isfile():
        with open(os.path.join(partial, os.path.basename(member.name)), 'wb') as out:
          shutil.copyfileobj(tar.extractfile(member), out)
  return folder


def _fetch(url, path):
  say('Downloading %s' % url)
  try:
    with urllib.request.urlopen(url, timeout=8) as response, whole_file(path) as partial:
      size = int(response.headers.get('Content-Length', 0)) or None
      with open(partial, 'wb') as out, tqdm(total=size, unit='B', unit_scale=True) as bar:
        for block in iter(lambda: response.read(1 << 20), b''):
          out.write(block)
          bar.update(len(block))
      if _md5(partial) != DATA_MD5:
        raise DataError('the MD5 is not %s: the download was cut or changed' % DATA_MD5)
  except (OSError, ValueError, http.client.HTTPException) as error:
    raise DataError('no data set in %s, and %s could not be fetched (%s). Put its .bin files or the archive into %s, or '
                    'make a small data set with: python data_input.py --synthetic --data_dir %s'
                    % (((os.path.dirname(path), url, error) + (os.path.dirname(path),) * 2)))  # fmt: skip


def _md5(path):
  digest = hashlib.md5()
  with open(path, 'rb') as f:
    for block in iter(lambda: f.read(1 << 20), b''):
      digest.update(block)
  return digest.hexdigest()


def synthesise(data_dir, records=2000):
  """Writes six files of `records` records in CIFAR-10's format, one shape and colour a class, below `data_dir`.

  The same call always writes the same bytes. Raises DataError where another data set lies: nothing is replaced.
  """
  folder = os.path.join(data_dir, FOLDER)
  existing = _data_folder(data_dir)
  draw = np.random.RandomState(0)
  files = {name: _synthetic_records(draw, records) for name in TRAIN_FILES + TEST_FILES}
  if existing:
    for name, content in files.items():
      path = os.path.join(existing, name)
      if not os.path.isfile(path) or not np.array_equal(np.fromfile(path, np.uint8), content.ravel()):
        raise DataError('--synthetic: %s holds another data set already; choose another --data_dir' % existing)
    return
  with whole_file(folder) as partial:
    os.makedirs(partial)
    for name, content in files.items():
      content.tofile(os.path.join(partial, name))


def _synthetic_records(draw, count):
  """uint8 [count, 3073]: a shape of its class's form and colour, placed and sized at random, on noisy grey."""
  labels = np.arange(count) % len(CLASSES)
  draw.shuffle(labels)
  grid = np.linspace(-1, 1, IMAGE_SIZE)
  random = lambda low, high: draw.uniform(low, high, [count, 1, 1])  # noqa: E731
  size = random(0.55, 0.8)
  x, y = (grid - random(-0.2, 0.2)) / size, (grid[:, None] - random(-0.2, 0.2)) / size
  inside, radius, stripe = np.maximum(abs(x), abs(y)) < 1, np.hypot(x, y), 2.5
  shapes = [
    radius < 1, inside, inside & (abs(x) < (y + 1) / 2), (radius < 1) & (radius > 0.6),
    inside & (np.maximum(abs(x), abs(y)) > 0.6), inside & (np.minimum(abs(x), abs(y)) < 0.3),
    inside & (np.minimum(abs(x - y), abs(x + y)) < 0.4), inside & (np.floor(y * stripe) % 2 == 0),
    inside & (np.floor(x * stripe) % 2 == 0), inside & ((np.floor(x * stripe) + np.floor(y * stripe)) % 2 == 0),
  ]  # fmt: skip
  shape = np.choose(labels[:, None, None], np.broadcast_arrays(*shapes))
  hue = labels / len(CLASSES)
  colour = 140 + 110 * np.cos(2 * np.pi * (hue[:, None] - np.array([0, 1, 2]) / 3))
  planes = np.where(shape[:, None], colour[:, :, None, None], random(40, 120)[:, None])
  planes = planes + draw.normal(0, 12, [count, 3, IMAGE_SIZE, IMAGE_SIZE])
  return np.hstack([labels[:, None], planes.clip(0, 255).reshape(count, -1)]).astype(np.uint8)


# ---------------------------------------------------------------- a batch of pixels


def decode(records):
  """Raw records, string [batch] -> uint8 images [batch, 32, 32, 3] and int32 labels [batch]."""
  data = tf.reshape(tf.decode_raw(records, tf.uint8), [-1, RECORD_BYTES])
  planes = tf.reshape(data[:, 1:], [-1, 3, IMAGE_SIZE, IMAGE_SIZE])
  # Stacked, not transposed: oneDNN prints an error line for each process that transposes uint8.
  return tf.stack(tf.unstack(planes, axis=1), axis=-1), tf.cast(data[:, 0], tf.int32)


def preprocess(images):
  """The evaluation preprocessing: centre 28x28, standardised. uint8 [batch, 32, 32, 3] -> float32 [batch, 28, 28, 3]."""
  edge = (IMAGE_SIZE - CROP_SIZE) // 2
  return standardize(tf.cast(images[:, edge : edge + CROP_SIZE, edge : edge + CROP_SIZE], tf.float32))


def data_augmentation(images):
  """The training preprocessing, drawn anew for each image. uint8 [batch, 32, 32, 3] -> float32 [batch, 28, 28, 3]."""
  images = tf.cast(random_crop_and_flip(images), tf.float32)
  return standardize(random_contrast(random_brightness(images, 63), 0.2, 1.8))


def _per_image(images, low, high, dtype=tf.float32):
  """One uniform draw from [low, high) for each image, shaped to broadcast over it: [batch, 1, 1, 1]."""
  return tf.random_uniform([tf.shape(images)[0], 1, 1, 1], low, high, dtype)


def random_crop_and_flip(images):
  """A random 28x28 window of each image, every second one mirrored; any dtype.

  Crop and flip choose pixels and change none, so both are one gather: of three bytes a pixel, before the cast.
  """
  corners = IMAGE_SIZE - CROP_SIZE + 1
  image = tf.range(tf.shape(images)[0])[:, None, None]
  span = tf.range(CROP_SIZE)
  mirrored = _per_image(images, 0, 2, tf.int32)[..., 0] * (CROP_SIZE - 1)
  row = _per_image(images, 0, corners, tf.int32)[..., 0] + span[:, None]
  column = _per_image(images, 0, corners, tf.int32)[..., 0] + tf.abs(mirrored - span)
  return tf.gather(tf.reshape(images, [-1, 3]), (image * IMAGE_SIZE + row) * IMAGE_SIZE + column)


def random_brightness(images, max_delta):
  """Adds a number from [-max_delta, max_delta) to each image, float32 [batch, height, width, 3]."""
  return images + _per_image(images, -max_delta, max_delta)


def random_contrast(images, lower, upper):
  """Scales each image's distance from its channels' means by a factor from [lower, upper); float32."""
  factor = _per_image(images, lower, upper)
  # images * factor + mean * (1 - factor): of the two forms the one with a single slow broadcast over pixels.
  return images * factor + tf.reduce_mean(images, [1, 2], keepdims=True) * (1 - factor)


def standardize(images):
  """Mean 0 and deviation 1 for each image, as tf.image.per_image_standardization; float32 [batch, h, w, 3]."""
  mean, variance = tf.nn.moments(images, [1, 2, 3], keep_dims=True)
  # The floor keeps an image of one colour at zeros instead of dividing by its deviation of zero.
  return (images - mean) * tf.rsqrt(tf.maximum(variance, 1.0 / (CROP_SIZE * CROP_SIZE * 3)))


# ---------------------------------------------------------------- queues


def default_threads():
  """Preprocessing threads that feed the towers and leave them the cores: 2 on 2 cores, at most the article's 16."""
  return min(16, max(2, (os.cpu_count() or 2) // 2))


def read_records(filenames, reader, count, num_epochs=None):
  """Up to `count` records at a time, of one file, in the file's order: keys and values, string [<= count].

  Safe to run from several threads; each record comes once an epoch. Files are shuffled in each epoch of training.
  """
  filename_queue = tf.train.string_input_producer(filenames, num_epochs=num_epochs, shuffle=num_epochs is None)
  return reader.read_up_to(filename_queue, count)


def batch_queue(tensors, num_threads):
  """A queue of whole batches, filled by `num_threads` threads that run `tensors`. Returns the queue."""
  queue = tf.FIFOQueue(QUEUE_BATCHES, [tensor.dtype for tensor in tensors])
  tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(tensors)] * num_threads))
  return queue


def next_batch(queue, tensors):
  """Takes a batch off a `batch_queue` of `tensors`; each call is another batch."""
  batch = queue.dequeue()
  for taken, put in zip(batch, tensors):
    taken.set_shape(put.shape)
  return batch


def run_through(session, fetches):
  """Starts the queue threads and yields `session.run(fetches)` until the data ends.

  Raises DataError with the reason where a reader failed: the main loop itself only sees that as a closed queue.
  """
  coord = tf.train.Coordinator()
  threads = tf.train.start_queue_runners(session, coord)
  try:
    while True:
      yield session.run(fetches)
  except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
    pass
  finally:
    coord.request_stop()
    try:
      coord.join(threads)
    except tf.errors.OpError as error:
      raise DataError('reading failed: ' + error.message)


def read_all(session, fetches, count):
  """What `fetches`, a list of [batch, ...] tensors of a single-pass input, give over all `count` records.

  Returns a list of arrays [count, ...], in the order in which the threads read. Raises DataError where records are
  missing or too many.
  """
  batches = []
  with tqdm(total=count, unit=' images', disable=not sys.stderr.isatty()) as bar:
    for batch in run_through(session, fetches):
      batches.append(batch)
      bar.update(len(batch[0]))
  results = [np.concatenate(parts) for parts in zip(*batches)]
  if not results or len(results[0]) != count:
    raise DataError('%d of %d records were read' % (len(results[0]) if results else 0, count))
  return results


class data_input(object):
  """CIFAR-10 as batches.

  Args:
    data_dir: folder with the .bin files, or the one above it.
    batch_size: images in a batch.
    num_classes: length of the one-hot labels; a label outside is an error.
    is_training: True: data_batch_1..5.bin, shuffled and augmented, without end. False: test_batch.bin, each record
      exactly once, the last batch smaller, evaluation preprocessing.
    num_threads: preprocessing threads.

  Attributes:
    image_batch: float32 [batch, 28, 28, 3]; label_batch: one-hot float32 [batch, num_classes].
    num_records: records in the files.
    queue: the queue of batches that all users of `next_batch` share; queue_fill: how full it is, a scalar in [0, 1].

  Raises:
    DataError: see `find_files`.
  """

  def __init__(self, data_dir, batch_size, num_classes, is_training, num_threads=None):
    self.batch_size = batch_size
    self.num_classes = num_classes
    self.is_training = is_training
    self.filenames, labels = find_files(data_dir, TRAIN_FILES if is_training else TEST_FILES, num_classes)
    self.num_records = sum(map(len, labels))
    with tf.device('/cpu:0'), tf.name_scope('input'):
      self._tensors = self.load_data()
      self.queue = batch_queue(self._tensors, num_threads or default_threads())
      self.queue_fill = self.queue.size() / QUEUE_BATCHES
    self.image_batch, self.label_batch = self.next_batch()

  def load_data(self):
    """Images and one-hot labels of one batch, before the batch queue."""
    reader = tf.FixedLengthRecordReader(RECORD_BYTES)
    if self.is_training:
      _, records = read_records(self.filenames, reader, 100)
      # The article's queue, but of records: a tenth of the memory, and a batch can be augmented at once.
      records = tf.train.shuffle_batch([records], self.batch_size, capacity=20400, min_after_dequeue=20000, enqueue_many=True)
      images, labels = decode(records)
      images = data_augmentation(images)
    else:
      _, records = read_records(self.filenames, reader, self.batch_size, num_epochs=1)
      images, labels = decode(records)
      images = preprocess(images)
    images.set_shape([self.batch_size if self.is_training else None, CROP_SIZE, CROP_SIZE, 3])
    return images, tf.one_hot(labels, self.num_classes)

  def next_batch(self):
    """Another batch off the shared queue: image_batch, label_batch."""
    with tf.device('/cpu:0'):
      return next_batch(self.queue, self._tensors)


# ---------------------------------------------------------------- run alone


def describe(data_dir):
  """Table of the data set: one row per file, its records, then its images per class."""
  paths, labels = find_files(data_dir, TRAIN_FILES + TEST_FILES, len(CLASSES))
  rows = [[len(label)] + list(np.bincount(label, minlength=len(CLASSES))) for label in labels]
  table = pd.DataFrame(rows, [os.path.basename(path) for path in paths], ['records'] + CLASSES)
  table.loc['total'] = table.sum()
  return '%s\n%s' % (os.path.dirname(paths[0]), table.to_string())


def visible(images):
  """Standardised images as uint8: -2 deviations is shown black, 2 white, and most pixels lie between."""
  return (images * 64 + 128).clip(0, 255).astype(np.uint8)


def write_png(path, image):
  """Writes uint8 [height, width, 3]."""
  with tf.Graph().as_default(), tf.Session(config=NO_GPU) as session, whole_file(path) as partial, open(partial, 'wb') as out:
    out.write(session.run(tf.image.encode_png(image)))


def preview(data_dir, path, draws=8, scale=3):
  """Writes a PNG sheet: one row per class, first the original, then what evaluation and `draws` of training make of it."""
  paths, labels = find_files(data_dir, TRAIN_FILES, len(CLASSES))
  shown = [np.flatnonzero(labels[0] == label)[:1] for label in range(len(CLASSES))]
  records = np.fromfile(paths[0], np.uint8).reshape(-1, RECORD_BYTES)[np.concatenate(shown)]
  with tf.Graph().as_default(), tf.Session(config=NO_GPU) as session:
    images, _ = decode([record.tobytes() for record in records])
    originals, *fed = session.run([images, preprocess(images)] + [data_augmentation(images) for _ in range(draws)])
  fed = [np.pad(visible(batch), [(0, 0), (2, 2), (2, 2), (0, 0)], 'constant') for batch in fed]
  rows = np.concatenate([originals] + fed, axis=2)
  write_png(path, np.concatenate(list(rows)).repeat(scale, 0).repeat(scale, 1))


def benchmark(data_dir, batch_size=128, seconds=5):
  """images/s of the training queue, once it runs."""
  with tf.Graph().as_default(), tf.Session(config=NO_GPU) as session:
    fetch = data_input(data_dir, batch_size, len(CLASSES), True).image_batch.op
    with contextlib.closing(run_through(session, fetch)) as batches:
      next(batches)  # waits until the queues are filled
      start, images = time.time(), 0
      while time.time() < start + seconds:
        next(batches)
        images += batch_size
      return images / (time.time() - start)


def main(_):
  if FLAGS.synthetic:
    synthesise(FLAGS.data_dir)
  print(describe(FLAGS.data_dir))
  if FLAGS.preview:
    preview(FLAGS.data_dir, FLAGS.preview)
    print('%s: one row per class: the original, evaluation, then draws of training' % FLAGS.preview)
  if FLAGS.benchmark:
    print('%d images/s with %d threads' % (benchmark(FLAGS.data_dir), default_threads()))


if __name__ == '__main__':
  run(main, FLAGS, __doc__)
