import io
import os
import subprocess

import numpy as np
import pandas as pd
import pytest
import tensorflow.compat.v1 as tf
from conftest import PROCESS_SECONDS, assert_readable, clean_error, command, logits_of, mistake, run_script

import test_tfrecords
import toTFRecords
from data_input import CLASSES, DataError


def write(path, names, images):
  with tf.python_io.TFRecordWriter(str(path)) as writer:
    for name, image in zip(names, images):
      writer.write(toTFRecords.example(name.encode('utf-8'), image))
  return path


def noise(count, seed=0):
  return np.random.RandomState(seed).randint(0, 256, [count, 32, 32, 3]).astype(np.uint8)


def predict(path, checkpoint, *arguments, **options):
  return run_script('test_tfrecords.py', '--tfrecords', path, '--checkpoint_dir', checkpoint, *arguments, **options)


def test_rows_are_kaggles_in_natural_order_with_the_right_classes(tmp_path, wide_awake):
  images, order = noise(12), np.random.RandomState(1).permutation(12)
  path = write(tmp_path / 'a.tfrecords', ['%d.png' % (i + 1) for i in order], images[order])
  done = predict(path, wide_awake)
  classes = np.array(CLASSES)[logits_of(wide_awake, images).argmax(1)]
  assert len(set(classes)) >= 3
  assert done.stdout == 'id,label\n' + ''.join('%d,%s\n' % (i + 1, label) for i, label in enumerate(classes))
  assert_readable(done.stderr)


def test_each_row_has_its_own_prediction(tmp_path, wide_awake):
  images = noise(300, seed=2)
  classes = np.array(CLASSES)[logits_of(wide_awake, images).argmax(1)]
  path = write(tmp_path / 'a.tfrecords', ['%s_%d.png' % (label, i) for i, label in enumerate(classes)], images)
  text = test_tfrecords.to_csv(*test_tfrecords.predict(str(path), 300, wide_awake, 8, 16), probabilities=True)
  table = pd.read_csv(io.StringIO(text))
  assert len(table) == 300 and list(table.columns) == ['id', 'label'] + CLASSES
  assert (table['id'].str.split('_').str[0] == table['label']).all()
  probabilities = table[CLASSES].values
  np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
  assert (np.array(CLASSES)[probabilities.argmax(1)] == table['label']).all()


@pytest.mark.parametrize('count', [1, 7, 8, 9, 100, 101])
def test_as_many_rows_as_images(tmp_path, wide_awake, count):
  images = noise(count)
  path = write(tmp_path / 'a.tfrecords', ['%d.png' % i for i in range(count)], images)
  assert test_tfrecords.check_tfrecords(str(path)) == count
  names, logits = test_tfrecords.predict(str(path), count, wide_awake, 8, 16)
  order = [int(name.split(b'.')[0]) for name in names]
  assert sorted(order) == list(range(count))
  np.testing.assert_allclose(logits, logits_of(wide_awake, images)[order], rtol=1e-2, atol=1e-3)


def test_odd_names_come_back_as_they_are(tmp_path, wide_awake):
  from PIL import Image

  folder = tmp_path / 'images'
  folder.mkdir()
  names = ['a b', 'a,b', 'a.b', '猫', 'été', 'sub/1']
  (folder / 'sub').mkdir()
  for name, image in zip(names, noise(len(names))):
    Image.fromarray(image).save(os.fsencode(str(folder / name) + '.png').decode('utf-8', 'surrogateescape'))
  env = {'LANG': 'C', 'LC_ALL': 'C'}
  run_script('toTFRecords.py', '--image_dir', folder, '--output', tmp_path / 'a', env=env)
  done = predict(tmp_path / 'a', wide_awake, env=env)
  assert sorted(pd.read_csv(io.StringIO(done.stdout))['id']) == sorted(names)


# ---- wrong input


def flip(data):
  return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


@pytest.mark.parametrize(
  'damage', [flip, lambda data: data[:-20], lambda data: b'text, not records\n' * 9, lambda data: b'', lambda data: data[3150:]]
)
def test_a_damaged_file_is_refused(tmp_path, damage):
  path = write(tmp_path / 'a.tfrecords', ['1.png', '2.png', '3.png'], noise(3))
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(DataError, match='a.tfrecords'):
    test_tfrecords.check_tfrecords(str(path))


def test_a_file_that_is_damaged_after_the_check_is_refused_by_the_readers(tmp_path, wide_awake):
  path = write(tmp_path / 'a.tfrecords', ['1.png', '2.png', '3.png'], noise(3))
  path.write_bytes(flip(path.read_bytes()))
  with pytest.raises(DataError, match='corrupted record'):
    test_tfrecords.predict(str(path), 3, wide_awake, 1, 4)


def test_records_of_another_schema_or_a_name_twice_are_refused(tmp_path):
  image = noise(1)[0]
  cases = {
    'image_raw': [toTFRecords.example(b'1.png', image[:31])],
    'image_name': [toTFRecords.example(b'1.png', image).replace(b'image_name', b'image_nome')],
    'damaged': [b'\xff\xff\xff'],
    'names': [toTFRecords.example(b'1.png', image)] * 2,
  }
  for word, records in cases.items():
    path = str(tmp_path / word)
    with tf.python_io.TFRecordWriter(path) as writer:
      for record in records:
        writer.write(record)
    with pytest.raises(DataError, match=word):
      test_tfrecords.check_tfrecords(path)


def test_wrong_paths_are_clean_errors_with_an_empty_stdout(tmp_path, wide_awake):
  path = write(tmp_path / 'a.tfrecords', ['1.png', '2.png'], noise(2))
  (tmp_path / 'cut').write_bytes(path.read_bytes()[:-20])
  for name in ('none', '', 'cut'):
    line = mistake(test_tfrecords, '--tfrecords', tmp_path / name, '--checkpoint_dir', wide_awake)
    assert str(tmp_path / name) in line and 'toTFRecords.py' in line
  assert 'no checkpoint' in clean_error('test_tfrecords.py', '--tfrecords', path, '--checkpoint_dir', tmp_path)


def test_a_full_disk_is_not_success(tmp_path, wide_awake):
  path = write(tmp_path / 'a.tfrecords', ['1.png', '2.png'], noise(2))
  with open('/dev/full', 'w') as full:
    done = predict(path, wide_awake, status=1, stdout=full)
  assert 'error: ' in done.stderr and 'No space left' in done.stderr and 'Traceback' not in done.stderr


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path, wide_awake):
  path = write(tmp_path / 'a.tfrecords', ['%d.png' % i for i in range(20000, 24000)], np.repeat(noise(1), 4000, 0))
  arguments = command('test_tfrecords.py', '--tfrecords', path, '--checkpoint_dir', wide_awake, '--probabilities')
  with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    assert process.stdout.readline().startswith(b'id,label,airplane')
    process.stdout.close()
    process.wait(PROCESS_SECONDS)
    stderr = process.stderr.read()
  assert b'Traceback' not in stderr and b'Exception ignored' not in stderr
