import hashlib
import http.server
import io
import os
import socket
import tarfile
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from conftest import (
  SCRIPTS,
  call,
  mistake,
  random_records,
  run_in_one_process,
  run_script,
  write_records,
  write_small_data,
)

import data_input
import train
from data_input import DataError


def run_once(fetches):
  with tf.Session() as session:
    return session.run(fetches)


def standardised(images):
  images = np.asarray(images, np.float64)
  deviation = np.maximum(images.std((1, 2, 3), keepdims=True), 1 / np.sqrt(images[0].size))
  return (images - images.mean((1, 2, 3), keepdims=True)) / deviation


# ---- pixels


def test_every_byte_of_a_record_comes_out_at_its_place():
  data = np.random.RandomState(0).randint(0, 256, [2, 3073]).astype(np.uint8)
  data[:, 0] = 7, 3
  with tf.Graph().as_default():
    images, labels = run_once(data_input.decode([record.tobytes() for record in data]))
  assert images.dtype == np.uint8 and images.shape == (2, 32, 32, 3)
  assert labels.tolist() == [7, 3]
  for row, column, channel in np.ndindex(32, 32, 3):
    assert (images[:, row, column, channel] == data[:, 1 + channel * 1024 + row * 32 + column]).all()


def test_crops_are_windows_and_flips_their_mirrors_drawn_for_each_image():
  original = np.arange(32 * 32 * 3).reshape(32, 32, 3)
  with tf.Graph().as_default():
    crops = run_once(data_input.random_crop_and_flip(tf.constant(np.stack([original] * 1000), tf.int32)))
  assert crops.shape == (1000, 28, 28, 3)
  drawn = set()
  for crop in crops:
    flipped = bool(crop[0, 0, 0] > crop[0, -1, 0])
    window = crop[:, ::-1] if flipped else crop
    top, left = divmod(int(window[0, 0, 0]) // 3, 32)
    assert (window == original[top : top + 28, left : left + 28]).all()
    drawn.add((top, left, flipped))
  assert len(drawn) == 5 * 5 * 2


def test_brightness_adds_one_number_to_each_image():
  images = np.random.RandomState(0).uniform(0, 255, [500, 4, 4, 3])
  with tf.Graph().as_default():
    added = run_once(data_input.random_brightness(tf.constant(images, tf.float32), 63)) - images
  assert added.std((1, 2, 3)).max() < 1e-4
  drawn = added[:, 0, 0, 0]
  assert len(set(drawn.round(3))) > 490
  assert -63.01 <= drawn.min() < -60 and 60 < drawn.max() <= 63.01


def test_contrast_scales_each_image_about_the_means_of_its_channels():
  images = np.random.RandomState(0).uniform(0, 255, [500, 4, 4, 3])
  with tf.Graph().as_default():
    out = run_once(data_input.random_contrast(tf.constant(images, tf.float32), 0.2, 1.8))
  mean = images.mean((1, 2), keepdims=True)
  factor = ((out - mean) * (images - mean)).sum((1, 2, 3)) / ((images - mean) ** 2).sum((1, 2, 3))
  np.testing.assert_allclose(out, mean + (images - mean) * factor[:, None, None, None], atol=1e-2)
  assert len(set(factor.round(4))) > 480
  assert 0.199 < factor.min() < 0.25 and 1.75 < factor.max() < 1.801


def test_standardize_is_tensorflows_own_with_mean_0_and_deviation_1():
  images = np.random.RandomState(0).uniform(0, 255, [5, 28, 28, 3]).astype(np.float32)
  images[3] = 100
  images[3, 0, 0, 0] = 100.5  # a deviation below the floor
  images[4] = 200
  with tf.Graph().as_default():
    ours, theirs = run_once(
      [data_input.standardize(tf.constant(images)), tf.stack([tf.image.per_image_standardization(image) for image in images])]
    )
  np.testing.assert_allclose(ours, theirs, atol=1e-5)
  np.testing.assert_allclose(ours.mean((1, 2, 3)), 0, atol=1e-4)
  np.testing.assert_allclose(ours[:3].std((1, 2, 3)), 1, atol=1e-5)
  assert abs(ours[3, 0, 0, 0] - 0.5 * np.sqrt(28 * 28 * 3)) < 0.1 and (ours[4] == 0).all()


def test_training_batches_are_standardised_and_differ_for_the_same_image(tmp_path):
  image = np.random.RandomState(1).randint(0, 256, 3072)
  for name in data_input.TRAIN_FILES:
    write_records(tmp_path / name, [4] * 10, np.stack([image] * 10))
  with tf.Graph().as_default(), tf.Session() as session:
    data = data_input.data_input(str(tmp_path), 50, 10, True)
    assert data.image_batch.shape.as_list() == [50, 28, 28, 3] and data.image_batch.dtype == tf.float32
    images, labels = next(data_input.run_through(session, [data.image_batch, data.label_batch]))
  assert (labels == np.eye(10)[4]).all()
  np.testing.assert_allclose(images.mean((1, 2, 3)), 0, atol=1e-4)
  np.testing.assert_allclose(images.std((1, 2, 3)), 1, atol=1e-4)
  assert len({one.tobytes() for one in images}) == 50


def test_the_training_augmentation_draws_contrast_as_it_says_and_crops_and_flips():
  # Every crop of this chequer has the same mean and deviation in each channel, so the contrast drawn can be read off.
  chequer = np.indices([32, 32]).sum(0) % 2
  image = np.stack([100 + 20 * chequer, 140 + 20 * chequer, 120 + 20 * chequer], 2).astype(np.uint8)
  with tf.Graph().as_default():
    out = run_once(data_input.data_augmentation(tf.constant(np.stack([image] * 2000))))
  assert out.shape == (2000, 28, 28, 3)
  mean = out.mean((1, 2))
  factor = (out[:, :, :, 0].std((1, 2)) / (mean[:, 1] - mean[:, 0])) / (10 / 40)
  assert 0.199 < factor.min() < 0.22 and 1.78 < factor.max() < 1.801 and abs(factor.mean() - 1) < 0.05
  corner = out[:, 0, 0, 0] > mean[:, 0]  # differs by one pixel of crop, or by a flip
  assert 0.4 < corner.mean() < 0.6


# ---- reading


def test_evaluation_is_the_standardised_centre_of_each_record(tmp_path):
  labels, images = random_records(tmp_path / 'test_batch.bin', 37)
  with tf.Graph().as_default(), tf.Session() as session:
    data = data_input.data_input(str(tmp_path), 8, 10, False, num_threads=1)
    session.run(tf.local_variables_initializer())
    fed, one_hot = data_input.read_all(session, [data.image_batch, data.label_batch], 37)
  np.testing.assert_allclose(fed, standardised(images[:, 2:30, 2:30]), atol=1e-4)
  assert (one_hot == np.eye(10)[labels]).all()


@pytest.mark.parametrize('num_threads', [1, 16])
@pytest.mark.parametrize('batch_size', [8, 37, 100])
def test_evaluation_reads_each_record_exactly_once(tmp_path, num_threads, batch_size):
  labels, images = random_records(tmp_path / 'test_batch.bin', 37)
  with tf.Graph().as_default(), tf.Session() as session:
    data = data_input.data_input(str(tmp_path), batch_size, 10, False, num_threads)
    session.run(tf.local_variables_initializer())
    fed, one_hot = data_input.read_all(session, [data.image_batch, data.label_batch], 37)
  expected = standardised(images[:, 2:30, 2:30])
  seen = [int(abs(expected - one).sum((1, 2, 3)).argmin()) for one in fed]
  assert sorted(seen) == list(range(37))
  assert (one_hot.argmax(1) == labels[seen]).all()


def test_read_all_refuses_a_wrong_count(tmp_path):
  random_records(tmp_path / 'test_batch.bin', 37)
  with tf.Graph().as_default(), tf.Session() as session:
    data = data_input.data_input(str(tmp_path), 8, 10, False)
    session.run(tf.local_variables_initializer())
    with pytest.raises(DataError, match='37 of 38 records'):
      data_input.read_all(session, [data.label_batch], 38)


def test_a_reader_that_fails_ends_the_pass_with_its_own_reason(tmp_path):
  random_records(tmp_path / 'test_batch.bin', 37)
  with tf.Graph().as_default(), tf.Session() as session:
    data = data_input.data_input(str(tmp_path), 8, 10, False)
    session.run(tf.local_variables_initializer())
    os.remove(str(tmp_path / 'test_batch.bin'))
    with pytest.raises(DataError, match='test_batch.bin'):
      data_input.read_all(session, [data.label_batch], 37)


def test_each_epoch_of_training_reads_all_five_files_in_its_own_order(small_data):
  paths, _ = data_input.find_files(str(small_data), data_input.TRAIN_FILES, 10)
  with tf.Graph().as_default(), tf.Session() as session:
    _, values = data_input.read_records(paths, tf.FixedLengthRecordReader(3073), 30)
    pixels = []
    for records in data_input.run_through(session, values):
      pixels += [record[1] for record in records]
      if len(pixels) >= 1000:
        break
  epochs = [pixels[i : i + 200] for i in range(0, 1000, 200)]
  assert all(sorted(epoch) == list(range(200)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_shuffle_queue_is_the_articles(small_data):
  with tf.Graph().as_default() as graph:
    data_input.data_input(str(small_data), 8, 10, True)
    (queue,) = [op for op in graph.get_operations() if op.type == 'RandomShuffleQueueV2']
    assert queue.get_attr('capacity') == 20400 and queue.get_attr('min_after_dequeue') == 20000
    assert all('CPU' in op.device for op in graph.get_operations() if op.name.startswith('input/'))


def test_four_towers_get_four_different_batches(tmp_path):
  # A record is known again by its label, one of 256, and its green: contrast and brightness leave its place between
  # red 0 and blue 255 as it is.
  index = np.arange(25600)
  pixels = np.stack([np.zeros(25600), index // 256, np.full(25600, 255)], 1).repeat(1024, 1)
  for i, name in enumerate(data_input.TRAIN_FILES):
    write_records(tmp_path / name, (index % 256)[i::5], pixels[i::5])
  with tf.Graph().as_default(), tf.Session() as session:
    data = data_input.data_input(str(tmp_path), 32, 256, True)
    batches = next(data_input.run_through(session, [data.next_batch() for _ in range(4)]))
  seen = []
  for images, labels in batches:
    red, green, blue = images[:, 0, 0].T
    seen += list(labels.argmax(1) + 256 * ((green - red) / (blue - red) * 255).round().astype(int))
  assert len(seen) == 128 and len(set(seen)) == 128
  assert len({record // 5120 for record in seen}) == 5


def test_ten_records_are_enough_to_start(tmp_path):
  write_small_data(tmp_path, per_file=2)
  with tf.Graph().as_default(), tf.Session() as session:
    data = data_input.data_input(str(tmp_path), 8, 10, True)
    labels = next(data_input.run_through(session, data.label_batch))
  assert labels.shape == (8, 10) and (labels.sum(1) == 1).all()


# ---- files


def damage_missing(folder):
  os.remove(str(folder / 'data_batch_3.bin'))


def damage_size(size):
  def damage(folder):
    with open(str(folder / 'data_batch_4.bin'), 'r+b') as f:
      f.truncate(size)

  return damage


def damage_label(folder):
  with open(str(folder / 'data_batch_2.bin'), 'r+b') as f:
    f.seek(17 * 3073)
    f.write(b'\xff')


def damage_to_labels_from_1_to_10(folder):
  write_records(folder / 'data_batch_5.bin', np.arange(40) % 10 + 1, np.arange(40))


def damage_folder(folder):
  damage_missing(folder)
  (folder / 'data_batch_3.bin').mkdir()


@pytest.mark.parametrize(
  'damage, words',
  [
    (damage_missing, ['Failed to find file', 'data_batch_3.bin']),
    (damage_folder, ['Failed to find file', 'data_batch_3.bin']),
    (damage_size(0), ['data_batch_4.bin', ' 0 bytes']),
    (damage_size(100), ['data_batch_4.bin', ' 100 bytes']),
    (damage_size(40 * 3073 - 1), ['data_batch_4.bin', ' 122919 bytes']),
    (damage_label, ['data_batch_2.bin', 'record 17', 'label 255']),
    (damage_to_labels_from_1_to_10, ['data_batch_5.bin', 'record 9', 'label 10']),
  ],
)
def test_damaged_files_are_named_before_any_graph_is_built(small_data, damage, words):
  damage(small_data)
  with tf.Graph().as_default() as graph:
    with pytest.raises(DataError) as caught:
      data_input.data_input(str(small_data), 8, 10, True)
    assert not graph.get_operations()
  for word in words:
    assert word in str(caught.value)


def test_the_folder_and_its_parent_both_work(tmp_path):
  (tmp_path / data_input.FOLDER).mkdir()
  write_small_data(tmp_path / data_input.FOLDER)
  for folder in (tmp_path, tmp_path / data_input.FOLDER):
    paths, labels = data_input.find_files(str(folder), data_input.TRAIN_FILES, 10)
    assert [os.path.basename(path) for path in paths] == data_input.TRAIN_FILES
    assert [label.tolist() for label in labels] == [[i % 10 for i in range(40)]] * 5


def test_a_file_as_data_dir_is_a_clean_error(small_data):
  path = small_data / 'test_batch.bin'
  assert '%s is a file' % path in mistake(data_input, '--data_dir', path)
  assert '%s is a file' % path in mistake(train, '--data_dir', path, '--checkpoint_dir', small_data / 'none')
  assert not (small_data / 'none').exists()


# ---- download


@pytest.fixture
def official(tmp_path, monkeypatch):
  """Serves a small archive of the official layout as DATA_URL; yields the folder that is served."""
  served, content = tmp_path / 'served', io.BytesIO()
  served.mkdir()
  write_small_data(served)
  with tarfile.open(fileobj=content, mode='w:gz') as tar:
    for name in data_input.TRAIN_FILES + data_input.TEST_FILES:
      tar.add(str(served / name), 'cifar-10-batches-bin/' + name)
  (served / data_input.ARCHIVE).write_bytes(content.getvalue())

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      body = (served / self.path[1:]).read_bytes()
      self.send_response(200)
      self.send_header('Content-Length', str(len(body)))
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, *_):
      pass

  server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  monkeypatch.setattr(data_input, 'DATA_URL', 'http://127.0.0.1:%d/%s' % (server.server_port, data_input.ARCHIVE))
  monkeypatch.setattr(data_input, 'DATA_MD5', hashlib.md5(content.getvalue()).hexdigest())
  yield served
  server.shutdown()
  server.server_close()


def test_an_empty_folder_is_filled_from_the_archive(official, tmp_path):
  paths, _ = data_input.find_files(str(tmp_path / 'new'), data_input.TRAIN_FILES, 10)
  assert paths == [str(tmp_path / 'new' / data_input.FOLDER / name) for name in data_input.TRAIN_FILES]
  for path in paths:
    with open(path, 'rb') as f:
      assert f.read() == (official / os.path.basename(path)).read_bytes()
  assert sorted(os.listdir(str(tmp_path / 'new'))) == [data_input.FOLDER, data_input.ARCHIVE]


def test_a_cut_archive_of_an_earlier_try_is_fetched_again(official, tmp_path, capsys):
  archive = tmp_path / 'new' / data_input.ARCHIVE
  archive.parent.mkdir()
  archive.write_bytes((official / data_input.ARCHIVE).read_bytes()[:1000])
  data_input.find_files(str(archive.parent), data_input.TRAIN_FILES, 10)
  assert archive.read_bytes() == (official / data_input.ARCHIVE).read_bytes()
  assert 'warning: %s has the MD5 ' % archive in capsys.readouterr().err


def test_a_whole_archive_is_unpacked_without_the_network(official, tmp_path, monkeypatch):
  archive = tmp_path / 'new' / data_input.ARCHIVE
  archive.parent.mkdir()
  archive.write_bytes((official / data_input.ARCHIVE).read_bytes())
  monkeypatch.setattr(data_input, 'DATA_URL', 'http://127.0.0.1:1/')
  data_input.find_files(str(archive.parent), data_input.TRAIN_FILES, 10)


def test_a_changed_archive_is_refused_and_leaves_nothing(official, tmp_path):
  (official / data_input.ARCHIVE).write_bytes(b'something else')
  with pytest.raises(DataError, match='MD5'):
    data_input.find_files(str(tmp_path / 'new'), data_input.TRAIN_FILES, 10)
  assert os.listdir(str(tmp_path / 'new')) == []


def test_without_network_the_error_says_what_to_do(official, tmp_path, monkeypatch):
  monkeypatch.setattr(data_input, 'DATA_URL', 'http://127.0.0.1:1/' + data_input.ARCHIVE)
  with pytest.raises(DataError) as caught:
    data_input.find_files(str(tmp_path / 'new'), data_input.TRAIN_FILES, 10)
  for word in ('http://127.0.0.1:1/', str(tmp_path / 'new'), '--synthetic'):
    assert word in str(caught.value)
  assert not os.path.exists(str(tmp_path / 'new'))


def test_nothing_is_downloaded_where_a_file_lies(official, tmp_path):
  (tmp_path / 'new').mkdir()
  random_records(tmp_path / 'new' / 'test_batch.bin', 5)
  with pytest.raises(DataError, match='data_batch_1.bin.*data_batch_5.bin'):
    data_input.find_files(str(tmp_path / 'new'), data_input.TRAIN_FILES, 10)
  assert os.listdir(str(tmp_path / 'new')) == ['test_batch.bin']


@pytest.mark.parametrize('reply', [b'no HTTP at all\n', b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab'])
def test_a_broken_reply_is_a_clean_error(tmp_path, monkeypatch, reply):
  with socket.socket() as server:
    server.bind(('127.0.0.1', 0))
    server.listen(1)

    def answer():
      connection, _ = server.accept()
      connection.recv(1000)
      connection.sendall(reply)
      connection.close()

    threading.Thread(target=answer, daemon=True).start()
    monkeypatch.setattr(data_input, 'DATA_URL', 'http://127.0.0.1:%d/' % server.getsockname()[1])
    with pytest.raises(DataError, match='could not be fetched'):
      data_input.find_files(str(tmp_path / 'new'), data_input.TRAIN_FILES, 10)


def test_a_folder_without_records_is_filled_all_the_same(official, tmp_path):
  (tmp_path / 'new' / data_input.FOLDER).mkdir(parents=True)
  (tmp_path / 'new' / data_input.FOLDER / 'readme.html').write_text('mine')
  assert len(data_input.find_files(str(tmp_path / 'new'), data_input.TRAIN_FILES, 10)[0]) == 5
  assert sorted(os.listdir(str(tmp_path / 'new'))) == [data_input.FOLDER, data_input.ARCHIVE]


def test_whole_file_leaves_devices_alone_and_writes_through_links(tmp_path):
  with pytest.raises(DataError, match='no regular file'), data_input.whole_file('/dev/null'):
    pass
  (tmp_path / 'link').symlink_to(tmp_path / 'target')
  with data_input.whole_file(str(tmp_path / 'link')) as partial, open(partial, 'w') as f:
    f.write('x')
  assert (tmp_path / 'link').is_symlink() and (tmp_path / 'target').read_text() == 'x'
  assert sorted(os.listdir(str(tmp_path))) == ['link', 'target']


# ---- run alone


def test_synthetic_writes_ten_balanced_classes_and_replaces_nothing(tmp_path, capsys):
  call(data_input, '--synthetic', '--data_dir', tmp_path, '--preview', tmp_path / 'sheet.png')
  rows = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert ['total', '12000'] + ['1200'] * 10 in rows and ['test_batch.bin', '2000'] + ['200'] * 10 in rows

  folder = tmp_path / data_input.FOLDER
  before = {path.name: path.read_bytes() for path in folder.iterdir()}
  data_input.synthesise(str(tmp_path))
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
  random_records(folder / 'test_batch.bin', 5)
  assert 'another data set' in mistake(data_input, '--synthetic', '--data_dir', tmp_path)

  with tf.Graph().as_default():
    sheet = run_once(tf.image.decode_png((tmp_path / 'sheet.png').read_bytes()))
  assert sheet.shape == (10 * 32 * 3, 10 * 32 * 3, 3)
  records = np.frombuffer(before['data_batch_1.bin'], np.uint8).reshape(-1, 3073)
  for label in range(10):
    first = records[records[:, 0] == label][0, 1:].reshape(3, 32, 32).transpose(1, 2, 0)
    assert (sheet[label * 96 : label * 96 + 96 : 3, :96:3] == first).all()
    # Beside it the evaluation image: 2 pixels of black, then the standardised centre, its mean at 128.
    pixels = first[2:30, 2:30].astype(float)
    shown = ((pixels - pixels.mean()) / pixels.std() * 64 + 128).clip(0, 255)
    tile = sheet[label * 96 : label * 96 + 96 : 3, 96:192:3]
    assert abs(tile[2:30, 2:30] - shown).max() <= 1 and not tile[:2].any() and not tile[:, :2].any()


def test_benchmark_counts_images_over_the_time_it_was_given(small_data):
  start = time.time()
  assert data_input.benchmark(str(small_data), batch_size=8, seconds=1) > 0
  assert time.time() - start >= 1


def test_help_and_stray_words_of_every_script():
  lines = [[script, '--help'] for script in SCRIPTS] + [[script, 'one', 'two words'] for script in SCRIPTS]
  ends = dict(zip(map(tuple, lines), run_in_one_process(*lines)))
  for script in SCRIPTS:
    text = ends[script, '--help'].stdout
    assert ends[script, '--help'].status == 0 and 'python ' + script in text and 'alsologtostderr' not in text
    word = 'two words' if script == 'val.py' else 'one'  # val.py takes one word: the checkpoint
    assert ends[script, 'one', 'two words'].status == "error: unexpected word '%s' on the command line (see --help)" % word
    assert not ends[script, 'one', 'two words'].stdout
  assert '--num_gpus' in ends['train.py', '--help'].stdout and '--data_dir' in ends['data_input.py', '--help'].stdout


def test_a_full_disk_under_stdout_is_not_success():
  with open('/dev/full', 'w') as full:
    done = run_script('network.py', status=1, stdout=full)
  assert 'error: ' in done.stderr and 'No space left' in done.stderr and 'ignored' not in done.stderr
