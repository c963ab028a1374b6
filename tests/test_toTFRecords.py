import io
import os
import signal
import subprocess
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from conftest import PROCESS_SECONDS, call, clean_error, command, mistake
from PIL import Image

import toTFRecords
from data_input import DataError


def save(path, pixels, mode='RGB', **options):
  Image.fromarray(np.asarray(pixels, np.uint8)).convert(mode).save(str(path), **options)


def noise(count=1, size=32, seed=0):
  return np.random.RandomState(seed).randint(0, 256, [count, size, size, 3]).astype(np.uint8)


def contents(path):
  """{name: uint8 [32, 32, 3]} of a TFRecords file, in its order."""
  images = {}
  for record in tf.python_io.tf_record_iterator(str(path)):
    feature = tf.train.Example.FromString(record).features.feature
    assert sorted(feature) == ['image_name', 'image_raw']
    (raw,), (name,) = feature['image_raw'].bytes_list.value, feature['image_name'].bytes_list.value
    images[name.decode('utf-8')] = np.frombuffer(raw, np.uint8).reshape(32, 32, 3)
  return images


def convert(folder, **options):
  """Converts a folder in this process; returns the images and (written, resized, unreadable)."""
  output = str(folder) + '.tfrecords'
  names, _ = toTFRecords.list_images(str(folder))
  result = toTFRecords.convert(str(folder), names, output, options.pop('num_threads', 4), options.pop('skip_unreadable', False))
  return contents(output), result


def test_pixels_and_names_round_trip_in_natural_order(tmp_path):
  images = noise(12)
  for i in np.random.RandomState(0).permutation(12):
    save(tmp_path / ('%d.png' % (i + 1)), images[i])
  (tmp_path / 'below').mkdir()
  save(tmp_path / 'below' / '3.png', images[0])
  found, result = convert(tmp_path)
  assert list(found) == ['%d.png' % i for i in range(1, 13)] + ['below/3.png']
  for i in range(12):
    assert (found['%d.png' % (i + 1)] == images[i]).all()
  assert result == (13, 0, [])


def test_the_same_bytes_for_any_number_of_threads(tmp_path):
  folder = tmp_path / 'images'
  folder.mkdir()
  for i, image in enumerate(noise(40)):
    save(folder / ('%d.png' % i), image)
  outputs = set()
  for num_threads in (1, 16):
    convert(folder, num_threads=num_threads)
    outputs.add((tmp_path / 'images.tfrecords').read_bytes())
  assert len(outputs) == 1


@pytest.mark.parametrize(
  'name, mode, options',
  [
    ('a.png', 'RGB', {}),
    ('a.png', 'RGBA', {}),
    ('a.png', 'P', {}),
    ('a.PNG', 'RGB', {}),
    ('a.gif', 'P', {}),
    ('a.Jpg', 'RGB', {'quality': 95}),
    ('a.jpeg', 'CMYK', {'quality': 95}),
    ('a.JPEG', 'RGB', {'quality': 95, 'progressive': True}),
  ],
)
def test_pure_red_comes_back_red_from_any_kind_of_file(tmp_path, name, mode, options):
  save(tmp_path / name, np.full([32, 32, 3], [255, 0, 0]), mode, **options)
  found, _ = convert(tmp_path)
  tolerance = 2 if 'j' in name.lower() else 0
  assert abs(found[name].astype(int) - [255, 0, 0]).max() <= tolerance


@pytest.mark.parametrize('mode', ['L', 'LA', 'I;16', '1'])
def test_grey_images_have_three_equal_channels(tmp_path, mode):
  grey = noise()[0, :, :, 0]
  if mode == 'I;16':
    Image.fromarray(grey.astype(np.uint16) * 257).save(str(tmp_path / 'a.png'))
  else:
    save(tmp_path / 'a.png', grey, mode)
  expected = (grey > 127) * 255 if mode == '1' else grey
  found, _ = convert(tmp_path)
  if mode == '1':
    assert set(np.unique(found['a.png'])) == {0, 255}
  else:
    assert (found['a.png'] == expected[:, :, None]).all()


def test_a_jpeg_named_png_is_decoded_as_a_viewer_does(tmp_path):
  image = np.asarray(Image.fromarray(noise(size=8)[0]).resize((32, 32), Image.BICUBIC))
  buffer = io.BytesIO()
  Image.fromarray(image).save(buffer, 'JPEG', quality=90)
  (tmp_path / 'a.png').write_bytes(buffer.getvalue())
  found, _ = convert(tmp_path)
  assert abs(found['a.png'].astype(int) - np.asarray(Image.open(buffer)).astype(int)).max() <= 1


def test_other_sizes_are_resized_and_counted(tmp_path):
  image = noise()[0]
  save(tmp_path / '1.png', image)
  save(tmp_path / '2.png', image.repeat(2, 0).repeat(2, 1))  # 64x64: the means of 2x2 are the image
  save(tmp_path / '3.png', np.full([28, 28, 3], 77))
  save(tmp_path / '4.png', np.full([300, 20, 3], 99))
  found, (written, resized, _) = convert(tmp_path)
  assert (written, resized) == (4, 3)
  assert (found['2.png'] == image).all() and (found['3.png'] == 77).all() and (found['4.png'] == 99).all()


@pytest.fixture
def bad_folder(tmp_path):
  """Ten images and five that are none, though named so."""
  folder = tmp_path / 'bad ones'
  folder.mkdir()
  for i, image in enumerate(noise(10)):
    save(folder / ('%d.png' % i), image)
  (folder / 'cut.png').write_bytes((folder / '1.png').read_bytes()[:1000])
  buffer = io.BytesIO()
  Image.fromarray(noise()[0]).save(buffer, 'JPEG')
  (folder / 'half.jpg').write_bytes(buffer.getvalue()[:500])
  (folder / 'empty.png').write_bytes(b'')
  (folder / 'page.png').write_text('<html>')
  (folder / 'lost.png').symlink_to(folder / 'nowhere')
  return folder


def test_unreadable_images_are_all_named_and_nothing_is_written(bad_folder, tmp_path):
  line = clean_error('toTFRecords.py', '--image_dir', bad_folder, '--output', tmp_path / 'out')
  for name in ('5 of 15', 'lost.png (No such file', 'cut.png', 'half.jpg', 'empty.png', 'page.png', '--skip_unreadable'):
    assert name in line
  assert sorted(os.listdir(str(tmp_path))) == ['bad ones']


def test_skip_unreadable_leaves_them_out_and_counts_them(bad_folder, tmp_path, capsys):
  for name in ('.DS_Store', 'Thumbs.db', 'readme.txt', '._1.png', 'labels.csv'):
    (bad_folder / name).write_bytes(b'x')
  save(bad_folder / '10.png', noise(size=64)[0])
  call(toTFRecords, '--image_dir', bad_folder, '--output', tmp_path / 'new' / 'out', '--skip_unreadable')
  printed = capsys.readouterr()
  assert printed.out == '%s: 11 written, 5 skipped, 1 resized to 32x32\n' % (tmp_path / 'new' / 'out')
  assert list(contents(tmp_path / 'new' / 'out')) == ['%d.png' % i for i in range(11)]
  (skipped,) = [line for line in printed.err.splitlines() if 'skipped' in line]
  assert skipped.startswith('5 skipped, unreadable: ') and 'page.png' in skipped
  (ignored,) = [line for line in printed.err.splitlines() if 'ignored' in line]
  for name in ('5 ignored', '.DS_Store', 'Thumbs.db', 'readme.txt', '._1.png', 'labels.csv'):
    assert name in ignored


def test_an_older_output_is_replaced_only_by_a_whole_one(bad_folder, tmp_path):
  (tmp_path / 'out').write_bytes(b'older')
  mistake(toTFRecords, '--image_dir', bad_folder, '--output', tmp_path / 'out')
  assert (tmp_path / 'out').read_bytes() == b'older'
  names, _ = toTFRecords.list_images(str(bad_folder))
  toTFRecords.convert(str(bad_folder), names, str(tmp_path / 'out'), 4, skip_unreadable=True)
  assert len(contents(tmp_path / 'out')) == 10
  assert sorted(os.listdir(str(tmp_path))) == ['bad ones', 'out']


def test_wrong_folders_are_clean_errors(tmp_path):
  (tmp_path / 'texts').mkdir()
  (tmp_path / 'texts' / 'readme.txt').write_text('x')
  for folder in ('missing', 'texts'):
    assert str(tmp_path / folder) in mistake(toTFRecords, '--image_dir', tmp_path / folder, '--output', tmp_path / 'out')
  save(tmp_path / '1.png', noise()[0])
  assert 'is a folder' in mistake(toTFRecords, '--image_dir', tmp_path, '--output', tmp_path / 'texts')
  before = (tmp_path / '1.png').read_bytes()
  assert 'taken for an image' in mistake(toTFRecords, '--image_dir', tmp_path, '--output', tmp_path / '1.png')
  assert (tmp_path / '1.png').read_bytes() == before
  assert not os.path.exists(str(tmp_path / 'out'))


def test_two_images_of_one_id_are_refused(tmp_path):
  save(tmp_path / '1.png', noise()[0])
  save(tmp_path / '1.jpg', noise()[0])
  with pytest.raises(DataError, match='1.png and 1.jpg|1.jpg and 1.png'):
    toTFRecords.list_images(str(tmp_path))


def test_hidden_and_linked_folders_are_left_out_and_named(tmp_path):
  for name in ('.ipynb_checkpoints', '__MACOSX', 'below'):
    (tmp_path / name).mkdir()
    save(tmp_path / name / '1.png', noise()[0])
  (tmp_path / 'linked').symlink_to(tmp_path / 'below')
  names, others = toTFRecords.list_images(str(tmp_path))
  assert names == ['below/1.png'] and sorted(others) == ['.ipynb_checkpoints/', '__MACOSX/', 'linked/']


def test_a_pipe_among_the_images_is_no_hang(tmp_path):
  save(tmp_path / '1.png', noise()[0])
  os.mkfifo(str(tmp_path / '2.png'))
  found, (written, _, (unreadable,)) = convert(tmp_path, skip_unreadable=True)
  assert list(found) == ['1.png'] and written == 1 and unreadable == '2.png (no regular file)'


def test_a_killed_conversion_leaves_nothing_that_looks_complete(tmp_path):
  folder = tmp_path / 'many'
  folder.mkdir()
  for i, image in enumerate(noise(200)):
    save(folder / ('%d.png' % i), image)
  for i in range(200, 8000):
    os.link(str(folder / ('%d.png' % (i % 200))), str(folder / ('%d.png' % i)))
  for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
    with subprocess.Popen(command('toTFRecords.py', '--image_dir', folder, '--output', tmp_path / 'out', '--num_threads', 1),
                          stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # fmt: skip
      while process.poll() is None and not list(tmp_path.glob('out*.partial')):
        time.sleep(0.01)
      process.send_signal(number)
      _, stderr = process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == status, stderr
    assert sorted(os.listdir(str(tmp_path)))[0] == 'many' and not os.path.exists(str(tmp_path / 'out'))
    if number != signal.SIGKILL:
      assert b'Traceback' not in stderr and os.listdir(str(tmp_path)) == ['many']
  found, _ = convert(folder)
  assert len(found) == 8000
