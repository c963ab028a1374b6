"""Nothing lost, nothing wrong in silence: SIGKILL, damaged input, thread counts. Short forms here; `-m long` runs the long ones."""

import io
import os
import random
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from conftest import ROOT, random_records, run_script, write_small_data
from PIL import Image

import data_input
import network
import test_tfrecords
import toTFRecords
import train
import val
from data_input import DataError

long = pytest.mark.long
FORMS = [pytest.param(False, id='short'), pytest.param(True, id='long', marks=long)]


# ---- SIGKILL

# train.py, but with a progress line at each step: how far a killed run has come.
EVERY_STEP = (
  'import data_input, train; train.SUMMARY_STEPS, train.LINE_SECONDS = 1, 0; data_input.run(train.main, train.FLAGS, "")'
)


def killed_run(data, folder, log, seconds):
  """Trains, saving every 3 steps, until SIGKILL `seconds` after the start of training. Returns the last step shown, or 0."""
  arguments = [sys.executable, '-c', EVERY_STEP, '--data_dir', data, '--checkpoint_dir', folder, '--batch_size', '2',
               '--save_steps', '3', '--keep_checkpoints', '2']  # fmt: skip
  with open(log, 'w') as stderr, subprocess.Popen(arguments, stderr=stderr, cwd=ROOT) as process:
    for _ in range(600):
      with open(log) as f:
        text = f.read()
      if 'starting' in text or 'resuming' in text:
        break
      assert process.poll() is None, text
      time.sleep(0.1)
    time.sleep(seconds)
    assert process.poll() is None, text
    process.kill()
  with open(log) as f:
    text = f.read()
  assert 'error: ' not in text and 'Traceback' not in text, text
  return int((re.findall(r'^step (\d+)/', text, re.M) or [0])[-1])


@pytest.mark.parametrize('is_long', FORMS)
def test_sigkill_at_any_moment_loses_at_most_one_save_interval(tmp_path, is_long, full_size):
  write_small_data(tmp_path)
  folder, draw, saved, lost = str(tmp_path / 'out'), random.Random(0), 0, []
  with tf.Graph().as_default():
    train.build(data_input.data_input(str(tmp_path), 2, 10, True), ['/cpu:0'], 1, 0.1, 0.9, 0.5)
    variables = tf.global_variables()
    for _ in range(20 if is_long else 1):
      reached = killed_run(str(tmp_path), folder, str(tmp_path / 'log'), draw.uniform(0, 7))
      for prefix in network.list_checkpoints(folder) if os.path.isdir(folder) else []:
        _, values = network.read_values(prefix, variables)
        assert all(np.isfinite(value).all() for value in values)
      point = network.resume_point(folder)
      now_saved = network.checkpoint_step(point) if point else 0
      assert saved <= now_saved and max(reached, saved) - now_saved <= 3
      lost.append(max(reached, saved) - now_saved)
      saved = now_saved
  print('steps lost by each kill: %s; saved up to step %d' % (lost, saved))
  run_script('train.py', '--data_dir', tmp_path, '--checkpoint_dir', folder, '--batch_size', 2, '--max_steps', saved + 2,
             full=True)  # fmt: skip
  reader = tf.train.NewCheckpointReader(network.find_checkpoint(folder))
  assert reader.get_tensor('global_step') == saved + 2 and reader.get_tensor('images_seen') == 2 * (saved + 2)
  assert not [name for name in os.listdir(folder) if 'temp' in name]


@long  # its short form are the other tests that train
def test_twenty_short_runs_all_end_well(small_data, tmp_path):
  for _ in range(20):
    done = run_script(
      'train.py', '--data_dir', small_data, '--checkpoint_dir', tmp_path / 'out', '--batch_size', 2, '--max_steps', 3
    )
    assert 'ERROR' not in done.stderr and 'step 3/3' in done.stderr
    shutil.rmtree(str(tmp_path / 'out'))


# ---- damaged input


def damaged(content, draw):
  """Bytes with one random damage: cut, flipped, inserted, swapped, emptied, or of another type."""
  kind, at = draw.randrange(7), draw.randrange(len(content))
  length = draw.choice([1, 2, 8, 100])
  other = draw.randrange(len(content))
  if kind == 0:
    return content[:at]
  if kind == 1:
    return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
  if kind == 2:
    return content[:at] + bytes(draw.randrange(256) for _ in range(length)) + content[at:]
  if kind == 3:
    at, other = sorted([at, other])
    length = min(length, other - at, len(content) - other)
    return (content[:at] + content[other : other + length] + content[at + length : other] + content[at : at + length]
            + content[other + length :])  # fmt: skip
  if kind == 4:
    return b''
  if kind == 5:
    return draw.choice([b'<html>\n' * 99, b'\x1f\x8b\x08' + content[:500], b'BM' + bytes(500), b'RIFF1234WEBPVP8 ' + bytes(99)])
  return content[:at] + content[at + length :]


@pytest.mark.parametrize('is_long', FORMS)
def test_damaged_bin_files_end_as_an_error_or_are_read_as_they_are(tmp_path, is_long):
  draw, errors = random.Random(1), 0
  write_small_data(tmp_path, per_file=4)
  random_records(tmp_path / 'test_batch.bin', 12)
  names = data_input.TRAIN_FILES + data_input.TEST_FILES
  for _ in range(200 if is_long else 20):
    path = tmp_path / draw.choice(names)
    content = path.read_bytes()
    renamed = draw.random() < 0.1
    path.write_bytes(damaged(content, draw))
    if renamed:
      path.rename(tmp_path / 'data batch.BIN')
    expected = 0
    for name in names:
      size = (tmp_path / name).stat().st_size if (tmp_path / name).exists() else 0
      labels = np.fromfile(str(tmp_path / name), np.uint8)[::3073] if size else np.array([255])
      expected += -10000 if size % 3073 or labels.max() > 9 else len(labels)
    try:
      table = data_input.describe(str(tmp_path))
      assert int(table.split('total')[1].split()[0]) == expected > 0
      with tf.Graph().as_default(), tf.Session() as session:
        data = data_input.data_input(str(tmp_path), 5, 10, False)
        session.run(tf.local_variables_initializer())
        (labels,) = data_input.read_all(session, [data.label_batch], data.num_records)
      records = np.fromfile(str(tmp_path / 'test_batch.bin'), np.uint8).reshape(-1, 3073)
      assert sorted(labels.argmax(1)) == sorted(records[:, 0])
    except DataError as error:
      assert expected < 0 and (path.name in str(error) or 'Failed to find' in str(error)), error
      errors += 1
    if renamed:
      (tmp_path / 'data batch.BIN').rename(path)
    path.write_bytes(content)
  print('%d ended as errors' % errors)
  assert errors > 5


def image_bytes(kind, draw):
  image = np.random.RandomState(draw.randrange(1000)).randint(0, 256, [32, 32, 3]).astype(np.uint8)
  buffer = io.BytesIO()
  Image.fromarray(image).save(buffer, kind)
  return buffer.getvalue()


@pytest.mark.parametrize('is_long', FORMS)
def test_damaged_images_end_as_an_error_or_as_what_pillow_sees(tmp_path, is_long):
  draw, refused = random.Random(2), 0
  folder, output = str(tmp_path / 'images'), str(tmp_path / 'out')
  os.mkdir(folder)
  contents = {name: image_bytes(kind, draw) for name, kind in (('1.png', 'PNG'), ('2.JPG', 'JPEG'), ('3.gif', 'GIF'))}
  odd_names = ['4.png', '.4.png', '4.PNG', '4', '4.png ', '4.txt', 'a\nb.png', '4\'".png', '-4.png', '%d%s.png', '４.png']
  for _ in range(200 if is_long else 20):
    name = draw.choice(sorted(contents))
    odd = draw.choice(odd_names)
    files = dict(contents, **{name: damaged(contents[name], draw), odd: contents[name]})
    for path, content in files.items():
      with open(os.path.join(folder, path), 'wb') as f:
        f.write(content)
    try:
      with Image.open(io.BytesIO(files[name])) as image:
        seen = np.asarray(image.convert('RGB'))
    except Exception:  # whatever Pillow says of a damaged file
      seen = None
    expected = {path for path in files if path.lower().endswith(toTFRecords.SUFFIXES) and not path.startswith('.')}
    names, others = toTFRecords.list_images(folder)
    assert set(names) == expected and set(others) == set(files) - expected
    try:
      written, _, unreadable = toTFRecords.convert(folder, names, output, 4, False)
      assert written == len(expected) and not unreadable and test_tfrecords.check_tfrecords(output) == written
      if seen is not None and seen.shape == (32, 32, 3) and name != '2.JPG':
        for record in tf.python_io.tf_record_iterator(output):
          feature = tf.train.Example.FromString(record).features.feature
          if feature['image_name'].bytes_list.value[0].decode() == name:
            assert feature['image_raw'].bytes_list.value[0] == seen.tobytes()
      os.remove(output)
    except DataError as error:
      assert name in str(error) and not os.path.exists(output)
      refused += 1
      assert toTFRecords.convert(folder, names, output, 4, True)[0] == len(expected) - 1
      os.remove(output)
    assert sorted(os.listdir(str(tmp_path))) == ['images']
    for path in files:
      os.remove(os.path.join(folder, path))
  print('%d ended as errors' % refused)
  assert refused > 5


@pytest.mark.parametrize('is_long', FORMS)
def test_damaged_tfrecords_end_as_an_error_or_as_whole_records(tmp_path, wide_awake, is_long):
  draw, errors, path = random.Random(3), 0, str(tmp_path / 'a.tfrecords')
  images = np.random.RandomState(0).randint(0, 256, [6, 32, 32, 3]).astype(np.uint8)
  with tf.python_io.TFRecordWriter(path) as writer:
    for i, image in enumerate(images):
      writer.write(toTFRecords.example(b'%d.png' % i, image))
  with open(path, 'rb') as f:
    content = f.read()
  record = len(content) // 6
  for i in range(200 if is_long else 20):
    new = damaged(content, draw) if i % 10 else content[: record * draw.randrange(7)]  # cut between two records, too
    with open(path, 'wb') as f:
      f.write(new)
    try:
      count = test_tfrecords.check_tfrecords(path)
      names, logits = test_tfrecords.predict(path, count, wide_awake, 4, 4)
      assert content.startswith(new) and len(new) == count * record
      assert sorted(names) == [b'%d.png' % i for i in range(count)] and len(logits) == count
    except DataError as error:
      assert path in str(error)
      errors += 1
  print('%d ended as errors' % errors)
  assert errors > 5


# ---- threads


@pytest.mark.parametrize('is_long', FORMS)
def test_threads_and_repetitions_change_no_byte(tmp_path, wide_awake, is_long, capfd):
  count, repetitions = (2000, 20) if is_long else (100, 2)
  data_input.synthesise(str(tmp_path), records=count)
  records = np.fromfile(str(tmp_path / data_input.FOLDER / 'test_batch.bin'), np.uint8).reshape(-1, 3073)
  with tf.python_io.TFRecordWriter(str(tmp_path / 'a')) as writer:
    for i, pixels in enumerate(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)):
      writer.write(toTFRecords.example(b'%d.png' % i, pixels))
  folder = shutil.copytree(wide_awake, str(tmp_path / 'checkpoints'))
  reports, predictions = set(), set()
  for num_threads in (1, 4, 16):
    with tf.Graph().as_default():
      validate = val.Validation(str(tmp_path), 128, num_threads)
      capfd.readouterr()
      for _ in range(repetitions):
        validate(folder)
        reports.add(capfd.readouterr().out)
    for _ in range(repetitions):
      names, logits = test_tfrecords.predict(str(tmp_path / 'a'), count, folder, 128, num_threads)
      predictions.add(test_tfrecords.to_csv(names, logits, probabilities=True))
  assert len(reports) == 1 and len(predictions) == 1
  assert '/ %d = ' % count in reports.pop()
